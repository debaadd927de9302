"use strict";
// The page stands without this script; it adds the choice of one answer and the view of one round.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const articles = [...document.querySelectorAll("article")];
  const items = [...document.querySelectorAll("#links li")];
  const panel = document.getElementById("round");
  const hint = panel.innerHTML;
  const own = {r: "recovered", b: "bonus", p: "plain", d: "plain"};
  const meaning = {d: "drafted and accepted", r: "the target's correction", b: "the target's bonus", p: "a plain step"};
  let answer = 0, token = -1, held = false;

  // First token of each round, one more at the end.
  const starts = data.map((one) => one.rounds.reduce((all, r) => [...all, all.at(-1) + r.num_emitted], [0]));
  const spans = articles.map((one) => [...one.querySelectorAll(".text > span")]);
  const roundOf = (a, t) => starts[a].findIndex((start, r) => t >= start && t < starts[a][r + 1]);

  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const visible = (text) => text === "" ? "▫" : text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍").replace(/ /g, "␣");

  function select(index) {
    answer = index;
    release();
    articles.forEach((one, a) => { one.hidden = a !== index; });
    items.forEach((item, a) => {
      const link = item.querySelector("a");
      if (a === index) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    });
    const rounds = data[index].rounds, most = Math.max(...rounds.map((r) => r.num_emitted));
    if (rounds.length) show(starts[index][rounds.findIndex((r) => r.num_emitted === most)]);
  }

  function release() {
    held = false;
    token = -1;
    for (const span of document.querySelectorAll(".in-round, .focus")) span.classList.remove("in-round", "focus");
    for (const cursor of document.querySelectorAll(".cursor")) cursor.setAttribute("x", "-1");
    panel.innerHTML = hint;
    panel.classList.remove("is-held");
  }

  function show(t) {
    const r = roundOf(answer, t);
    if (r < 0 || !spans[answer][t]) return;
    token = t;
    for (const span of articles[answer].querySelectorAll(".in-round, .focus")) span.classList.remove("in-round", "focus");
    for (let i = starts[answer][r]; i < starts[answer][r + 1]; i++) spans[answer][i]?.classList.add("in-round");
    spans[answer].forEach((span, i) => { span.tabIndex = i === t ? 0 : -1; });
    spans[answer][t].classList.add("focus");
    for (const cursor of articles[answer].querySelectorAll(".cursor")) cursor.setAttribute("x", r);
    draw(r, t);
  }

  function draw(r, t) {
    const one = data[answer], round = one.rounds[r], count = one.rounds.length;
    const title = make("h3");
    title.append(make("span", "", `Round ${r + 1} of ${count}`));
    panel.classList.toggle("is-held", held);
    if (held) title.append(make("small", "held", "held"));
    const add = (label, name, act) => {
      const button = make("button", "", label);
      button.type = "button";
      button.setAttribute("aria-label", name);
      button.addEventListener("click", act);
      title.append(button);
      return button;
    };
    for (const [label, name, next] of [["‹", "Round before", r - 1], ["›", "Next round", r + 1]]) {
      add(label, name, () => {
        held = true;
        show(starts[answer][next]);
        panel.querySelector(`button[aria-label="${name}"]`)?.focus();
      }).disabled = next < 0 || next >= count;
    }
    if (held) add("×", "Let go", release);
    const nodes = Math.max(0, round.parents.length - 1), accepted = round.path.length;
    const told = nodes ? `${round.source || "The drafter"} proposed ${nodes} ${nodes === 1 ? "token" : "tokens"}: ${accepted} accepted, ${nodes - accepted} rejected.`
                       : "Nothing was proposed: a plain step.";
    const about = make("p");
    about.append(`Token ${t + 1} of ${one.ids.length}: `, make("code", "", visible(spans[answer][t].textContent)),
                 ` id ${one.ids[t]}, ${meaning[one.origins[t]] || ""}`);
    const total = round.ms.reduce((a, b) => a + b, 0), split = make("div", "split"), ms = make("p", "ms");
    ["draft", "verify", "rest"].forEach((name, part) => {
      const piece = make("i", name);
      piece.style.width = `${total ? 100 * round.ms[part] / total : 0}%`;
      split.append(piece);
      const key = make("span", "key");
      key.append(make("i", name), `${name} ${round.ms[part].toFixed(2)} ms`);
      ms.append(key);
    });
    panel.replaceChildren(title, make("p", "", `${told} ${total.toFixed(1)} ms.`), about, split, ms, tree(one, round, r));
  }

  // Rows of a tree, top to bottom, as a commit graph is drawn: what stood runs down the first lane, and whatever was
  // rejected branches off into a lane further right, before the lane goes on.
  function tree(one, round, r) {
    const children = round.parents.map(() => []);
    round.parents.forEach((parent, node) => { if (parent >= 0) children[parent].push(node); });
    const kept = new Set(round.path), last = round.path.length ? round.path.at(-1) : 0;
    const final = starts[answer][r + 1] - 1, origin = one.origins[final];
    const rows = [];
    const walk = (node, lane, from, depth) => {
      const row = rows.length, confidence = round.confidences[node - 1];
      const sure = confidence === undefined ? "" : ` ${confidence.toFixed(2)}`;
      const kind = node === 0 ? "root" : kept.has(node) ? "accepted" : "rejected";
      const note = node === 0 ? "last token so far" : kind + sure;
      rows.push({lane, from, depth, kind, text: round.texts[node] ?? "?", note});
      const ends = node === last && origin !== "d";
      const straight = ends ? undefined : children[node].find((child) => kept.has(child)) ?? children[node].at(-1);
      for (const child of children[node]) if (child !== straight) walk(child, lane + 1, row, depth + 1);
      if (straight !== undefined) walk(straight, lane, row, depth + 1);
      if (ends) rows.push({lane, from: row, depth: depth + 1, kind: own[origin], text: spans[answer][final].textContent, note: meaning[origin]});
    };
    walk(0, 0, -1, 0);
    return graph(rows);
  }

  function graph(rows) {
    const high = 25, step = 18, x = (lane) => 9 + step * lane, y = (row) => high * row + high / 2;
    const space = document.querySelector(".timeline svg").namespaceURI;
    const shape = (name, attributes) => {
      const element = document.createElementNS(space, name);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      return element;
    };
    const lanes = 1 + Math.max(...rows.map((one) => one.lane));
    const svg = shape("svg", {width: step * lanes, height: high * rows.length, "aria-hidden": "true"});
    const stands = (one) => one.kind !== "rejected";
    for (const strong of [false, true]) rows.forEach((one, row) => {
      if (one.from < 0 || stands(one) !== strong) return;
      const bend = one.lane === rows[one.from].lane ? "" : `H${x(one.lane)}`;
      svg.append(shape("path", {class: strong ? "edge stands" : "edge", d: `M${x(rows[one.from].lane)} ${y(one.from)}V${y(row)}${bend}`}));
    });
    const list = make("ul");
    rows.forEach((one, row) => {
      const at = [x(one.lane), y(row)];
      svg.append(["recovered", "bonus", "plain"].includes(one.kind)
        ? shape("path", {class: `dot ${one.kind}-dot`, d: `M${at[0]} ${at[1] - 7}l7 7l-7 7l-7 -7z`})
        : shape("circle", {class: `dot ${one.kind}-dot`, cx: at[0], cy: at[1], r: 5.5}));
      const item = make("li", one.kind === "rejected" ? "rejected" : ""), code = make("code", "", visible(one.text));
      item.style.paddingLeft = `${step * (one.lane + 1) + 6}px`;
      item.setAttribute("aria-label", `depth ${one.depth}, ${one.note}: ${visible(one.text)}`);
      code.title = one.text;
      item.append(code, make("small", "", one.note));
      list.append(item);
    });
    const whole = make("div", "tree");
    whole.append(svg, list);
    return whole;
  }

  function filter() {
    const category = document.getElementById("category").value, side = document.getElementById("side").value;
    const fits = items.map((item) => (!category || item.dataset.category === category) && (!side || item.dataset.side === side));
    items.forEach((item, a) => { item.hidden = !fits[a]; });
    const found = fits.filter(Boolean).length;
    document.getElementById("count").textContent = `${found} of ${items.length} answers`;
    if (!fits[answer] && found) location.hash = `answer-${fits.indexOf(true) + 1}`;
  }

  function fromAddress() {
    const asked = Number(location.hash.replace("#answer-", "")) - 1;
    select(articles[asked] ? asked : 0);
    window.scrollTo(0, 0);
  }

  articles.forEach((article, a) => {
    const text = article.querySelector(".text");
    const at = (event) => spans[a].indexOf(event.target.closest(".text > span"));
    if (spans[a][0]) spans[a][0].tabIndex = 0;
    text.addEventListener("mouseover", (event) => { if (!held && at(event) >= 0) show(at(event)); });
    text.addEventListener("focusin", (event) => { if (at(event) >= 0 && at(event) !== token) show(at(event)); });
    text.addEventListener("click", (event) => { if (at(event) >= 0) { held = true; spans[a][at(event)].focus({preventScroll: true}); show(at(event)); } });
    text.addEventListener("keydown", (event) => {
      const here = at(event), r = roundOf(a, here), end = starts[a].length - 2;
      const goal = {
        ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: spans[a].length - 1,
        ArrowDown: starts[a][Math.min(end, r + 1)], ArrowUp: starts[a][Math.max(0, r - 1)],
      }[event.key];
      if (event.key === "Enter" || event.key === " ") { held = true; show(here); event.preventDefault(); }
      if (goal === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      spans[a][Math.max(0, Math.min(spans[a].length - 1, goal))].focus();
    });
    for (const svg of article.querySelectorAll(".timeline svg")) {
      const point = (event) => {
        const box = svg.getBoundingClientRect(), count = data[a].rounds.length;
        return starts[a][Math.max(0, Math.min(count - 1, Math.floor(count * (event.clientX - box.left) / box.width)))];
      };
      svg.addEventListener("mousemove", (event) => { if (!held) show(point(event)); });
      svg.addEventListener("click", (event) => { held = true; show(point(event)); });
    }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") release(); });
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".legend button");
    if (!button) return;
    const off = document.body.classList.toggle(`off-${button.dataset.origin}`);
    for (const other of document.querySelectorAll(`.legend [data-origin="${button.dataset.origin}"]`))
      other.setAttribute("aria-pressed", String(!off));
  });
  for (const id of ["category", "side"]) document.getElementById(id).addEventListener("change", filter);
  window.addEventListener("hashchange", fromAddress);
  fromAddress();
  filter();
})();

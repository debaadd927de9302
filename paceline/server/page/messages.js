// How messages look: what was asked, and answers with the origin of their tokens, their figures and what can be done with them.
const ORIGINS = {drafted: "drafted, and confirmed by the model", recovered: "the model's own, where the draft was wrong",
  bonus: "the model's own, after a draft that was right to its end", plain: "the model's own; nothing was drafted here"};
const hint = ([, origin, source]) => (ORIGINS[origin] || origin) + (source ? ` (${source})` : "");

// Paints texts by the origin of their tokens. The text may be a part of what the tokens say, as without the reasoning.
class Paint {
  constructor(tokens) {
    Object.assign(this, {tokens, starts: [], said: "", shift: 0});
  }

  // Before the texts of `whole` are put.
  begin(whole) {
    while (this.starts.length < this.tokens.length) {
      this.starts.push(this.said.length);
      this.said += this.tokens[this.starts.length - 1][0];
    }
    this.shift = this.said.startsWith(whole) || whole.startsWith(this.said) ? 0 : this.said.lastIndexOf(whole);
    if (!this.said) this.shift = -1;
  }

  put(place, text, at) {
    if (this.shift < 0) { place.append(text); return; }
    let low = 0, high = this.starts.length - 1, from = 0;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= at + this.shift) low = middle; else high = middle - 1;
    }
    while (from < text.length) {
      const token = this.tokens[low];
      while (this.tokens[low + 1]?.[1] === token[1] && this.tokens[low + 1][2] === token[2]) low++;
      const stop = (this.starts[++low] ?? Infinity) - at - this.shift, piece = text.slice(from, stop);
      for (const part of piece.split(/(\s{2,}|\n)/)) place.append(token[1] === "plain" || !part.trim() ? part : spanOf(token, part));
      from = stop;
    }
  }
}

function spanOf(token, text) {
  const span = make("span", token[1] in ORIGINS ? token[1] : "plain", text);
  span.title = hint(token);
  return span;
}

// ‹ 2 / 3 › where a message was edited or asked again.
function versions(talk, index, act) {
  const all = siblingsOf(talk, index), place = all.indexOf(index), go = (step) => () => act.show(all[place + step]);
  if (all.length < 2) return "";
  const back = button("Earlier version", "back", go(-1)), on = button("Later version", "on", go(1));
  back.disabled = place === 0;
  on.disabled = place === all.length - 1;
  return make("span", "versions", back, `${place + 1} / ${all.length}`, on);
}

function pictureOf({uri, name}) {
  const image = make("img");
  image.src = /^data:image\//.test(uri) ? uri : "";
  image.alt = name;
  return image;
}

function userMessage(talk, index, act) {
  const node = talk.nodes[index], article = make("article", "user"), foot = make("div", "foot");
  const bubble = make("div", "bubble", ...(node.images || []).map(pictureOf), make("div", "said", node.text));
  article.ariaLabel = "You";
  const tools = [button("Edit and send again", "edit", edit), button("Copy", "copy", () => copy(node.text))];
  const update = () => foot.replaceChildren(versions(talk, index, act), ...tools);
  function edit() {
    const area = make("textarea"), form = make("form", "edit", area);
    const cancel = button("Cancel", "", () => form.replaceWith(bubble)), send = button("Send", "");
    area.value = node.text;
    area.ariaLabel = "Your message";
    area.rows = Math.min(12, node.text.split("\n").length + 1);
    send.type = "submit";
    send.className = "main";
    form.append(make("div", "row", cancel, send));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.replaceWith(bubble);
      if (area.value.trim()) act.ask(area.value.trim(), node.images || [], node.parent);
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); cancel.click(); }
      if (sends(event)) { event.preventDefault(); form.requestSubmit(); }
    });
    bubble.replaceWith(form);
    area.focus();
  }
  article.append(bubble, foot);
  return {article, update};
}

// An answer: `draw` shows what is there so far, `update` also what can be done with it.
function answerMessage(talk, index, act) {
  const node = talk.nodes[index], article = make("article", "assistant"), body = make("div", "text"), foot = make("div", "foot");
  const thoughts = make("div", "text"), reasoning = make("details", "reasoning", make("summary", "", "Reasoning"), thoughts);
  const calls = make("div", "calls"), problem = make("div", "problem");
  let drawing = null, shown = "", drawn = "", thinking = new Drawing(thoughts, (place, text) => place.append(text));
  const paint = new Paint(node.tokens);
  article.ariaLabel = "Answer";
  article.append(reasoning, body, calls, problem, foot);
  problem.setAttribute("role", "alert");

  function draw(isOpen) {
    const view = settings.view === "tokens" && node.tokens.length ? "tokens" : "rendered";
    const state = [view, node.text.length, node.reasoning.length, node.tokens.length, isOpen].join();
    if (state === drawn && !isOpen) return;
    drawn = state;
    if (view !== shown) {
      shown = view;
      body.className = `text ${view}`;
      body.replaceChildren();
      drawing = new Drawing(body, (...piece) => paint.put(...piece));
    }
    if (view === "tokens") {
      for (let k = body.childNodes.length; k < node.tokens.length; k++) body.append(spanOf(node.tokens[k], node.tokens[k][0]));
    } else {
      paint.begin(node.text);
      drawing.update(node.text, isOpen);
    }
    article.ariaBusy = String(Boolean(isOpen));
    article.classList.toggle("waiting", Boolean(isOpen) && !node.text && !node.reasoning);
    reasoning.hidden = !node.reasoning;
    if (node.reasoning) {
      thinking.update(node.reasoning, isOpen && !node.text);
      reasoning.firstChild.textContent = isOpen && !node.text ? "Reasoning …" : "Reasoning";
    }
    calls.replaceChildren(...node.calls.filter(Boolean).map(callOf));
  }
  function update(isOpen = act.isRunning(index)) {
    draw(isOpen);
    problem.replaceChildren();
    problem.hidden = !node.problem;
    if (node.problem) {
      const {title, message} = node.problem;
      problem.append(make("strong", "", title), make("p", "", message), button("Try again", "", () => act.again(index)));
    }
    foot.hidden = isOpen || Boolean(node.problem && !node.text && siblingsOf(talk, index).length < 2);
    if (foot.hidden) return;
    const tools = make("span", "tools", versions(talk, index, act));
    if (node.text || !node.problem) {
      tools.append(button("Copy the answer", "copy", () => copy(node.text)), button("Answer again", "again", () => act.again(index)));
    }
    foot.replaceChildren(tools, ...(node.figures ? [facts(node), comparison(node, index, act)] : []));
  }
  return {article, draw, update};
}

function callOf({name, arguments: written}) {
  let shown = written;
  try { shown = JSON.stringify(JSON.parse(written), null, 2); } catch { /* cut */ }
  const pre = make("pre", "", make("code", "", shown));
  pre.tabIndex = 0;
  return make("div", "code", make("div", "code-head", make("span", "", `calls ${name}`)), pre);
}

// What an answer is remembered by once it has ended.
const figuresOf = (got) => ({
  tokens: got.tokens.length, tokensAPass: got.tokens.length / got.own, pace: pace(got),
  firstSeconds: (got.first - got.begin) / 1000, drafts: got.drafts,
});

// One quiet line; the rest unfolds.
function facts({figures, end, params, model}) {
  const speed = Number.isFinite(figures.pace) ? [make("b", "", number(figures.pace, 1)), " tokens/s · "] : [];
  const summary = make("summary", "", ...speed, make("b", "", number(figures.tokensAPass, 2)), " tokens a pass");
  const row = (name, value) => [make("dt", "", name), make("dd", "", value)], list = make("dl");
  const ends = {length: "at the limit of tokens", stop: "by itself", tool_calls: "with a call", "": "stopped"};
  list.append(...row("Tokens", String(figures.tokens)), ...row("First token after", `${number(figures.firstSeconds, 2)} s`));
  list.append(...row("Ended", ends[end] || end), ...row("Model", model), ...row("Seed", String(params.seed)));
  list.append(...row("Drafts", params.speculative?.method || "the server's choice"));
  const drafts = figures.drafts?.num_spec_steps;
  if (drafts) {
    const bars = make("span", "positions");
    figures.drafts.num_accepted_tokens_per_pos.forEach((count, place) => {
      const bar = make("i");
      bar.title = `token ${place + 1} of a draft: accepted in ${count} of ${drafts} drafts`;
      bar.style.height = `${100 * count / drafts}%`;
      bars.append(bar);
    });
    list.append(make("dt", "", "Accepted by position"), make("dd", "", bars));
  } else if (figures.drafts) list.append(...row("Accepted", "nothing was drafted"));
  return make("details", "facts", summary, list);
}

function comparison(node, index, act) {
  const {plain, pace: ours} = node.figures;
  if (plain) {
    const times = ours / plain.pace;
    return make("span", "compared", make("b", "", `${number(times, 2)} ×`), ` plain decoding, ${plain.isSame ? "the same text" : "another text"}`);
  }
  const isOffered = node.end && node.figures.tokens > 8 && node.params.speculative?.method !== "none";
  return isOffered ? button("Compare with plain decoding", "", (event) => act.compare(index, event.target)) : "";
}

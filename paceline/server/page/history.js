// Conversations: a tree of messages each, kept in this browser's database and nowhere else.
//
// A message is {role, parent, text, ...}; `parent` is the index of the one before it, -1 for the first. Editing or asking again
// adds a sibling, so that nothing is lost. `leaf` is the end of the path that is shown.
const newTalk = (system) => ({
  id: crypto.randomUUID?.() || `${Date.now()}-${Math.random()}`, title: "", changed: Date.now(), system, nodes: [], leaf: -1,
});

function pathOf(talk, leaf = talk.leaf) {
  const path = [];
  for (let at = leaf; at >= 0; at = talk.nodes[at].parent) path.unshift(at);
  return path;
}

function siblingsOf(talk, index) {
  const {parent, role} = talk.nodes[index];
  return [...talk.nodes.keys()].filter((other) => talk.nodes[other].parent === parent && talk.nodes[other].role === role);
}

function addNode(talk, node) {
  talk.leaf = talk.nodes.push(node) - 1;
  talk.title ||= node.text.trim().split("\n", 1)[0].slice(0, 80) || "Picture";
  return talk.leaf;
}

// The newest end below a message.
function endOf(talk, index) {
  for (;;) {
    const next = talk.nodes.findLastIndex((node) => node.parent === index);
    if (next < 0) return index;
    index = next;
  }
}

// The messages for the server, up to `leaf`.
function messagesOf(talk, leaf, system = talk.system) {
  const first = system.trim() ? [{role: "system", content: system}] : [];
  const said = pathOf(talk, leaf).map((index) => talk.nodes[index]).filter((node) => node.role === "user" || node.text);
  return [...first, ...said.map(({role, text, images = []}) => {
    const parts = [...images.map(({uri}) => ({type: "image_url", image_url: {url: uri}})), ...(text ? [{type: "text", text}] : [])];
    return {role, content: images.length ? parts : text};
  })];
}

// The database. Where there is none (some private windows), or it is full, the page goes on and says so once.
const shelf = {
  talks: new Map(),  // all of them, in memory
  keeps: true,
  async open() {
    try {
      this.base = await new Promise((done, fail) => {
        const request = indexedDB.open("paceline", 1);
        request.onupgradeneeded = () => request.result.createObjectStore("talks", {keyPath: "id"});
        request.onsuccess = () => done(request.result);
        request.onerror = () => fail(request.error);
        request.onblocked = () => fail(new Error("blocked"));
      });
      await this.load();
    } catch {
      this.base = null;
      notice("This browser lets the page keep nothing: conversations end with this tab.");
    }
  },
  async load() {
    const found = this.base ? await this.run("readonly", (store) => store.getAll()) : [];
    for (const talk of found) if (talk.id !== talking?.id) this.talks.set(talk.id, talk);
  },
  run(mode, work) {
    return new Promise((done, fail) => {
      const transaction = this.base.transaction("talks", mode), request = work(transaction.objectStore("talks"));
      transaction.oncomplete = () => done(request.result);
      transaction.onerror = transaction.onabort = () => fail(transaction.error || request.error);
    });
  },
  async change(work) {
    if (!this.base) return;
    try {
      await this.run("readwrite", work);
      this.keeps = true;
    } catch (error) {
      const isFull = error?.name === "QuotaExceededError";
      const why = isFull ? "The browser's storage is full: export or delete conversations." : "The browser could not keep a conversation.";
      if (this.keeps) notice(`${why} What is new stays in this tab.`);
      this.keeps = false;
    }
  },
  async put(talk) {
    this.talks.set(talk.id, talk);
    if (settings.keeps) await this.change((store) => store.put(talk));
  },
  async remove(id) {
    this.talks.delete(id);
    await this.change((store) => store.delete(id));
  },
  async clear() {
    this.talks.clear();
    await this.change((store) => store.clear());
  },
  sorted() {
    return [...this.talks.values()].sort((one, other) => other.changed - one.changed);
  },
};

const fileName = (talk) => talk.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";

function asMarkdown(talk) {
  const parts = [`# ${talk.title}`, ...(talk.system.trim() ? [`*System prompt:* ${talk.system}`] : [])];
  for (const index of pathOf(talk)) {
    const {role, text, images = []} = talk.nodes[index];
    parts.push(`## ${role === "user" ? "You" : "Answer"}`, ...images.map(({name}) => `*Picture: ${name}*`), text);
  }
  return `${parts.join("\n\n")}\n`;
}

// The list of conversations. open: shows one. drop: after one was deleted.
function listTalks(open, drop) {
  if ($("conversations").querySelector("input")) return;  // one is being renamed
  const rows = shelf.sorted().map((talk) => {
    const title = button(talk.title, "", () => open(talk.id)), more = button(`More about ${talk.title}`, "more");
    title.className = "title";
    if (talk.id === talking.id) title.setAttribute("aria-current", "true");
    const row = make("li", "", title, more);
    more.setAttribute("aria-expanded", "false");
    more.addEventListener("click", () => toggleMenu(row, more, [
      ["Rename", () => rename(row, title, talk)],
      ["Export as Markdown", () => download(`${fileName(talk)}.md`, "text/markdown", asMarkdown(talk))],
      ["Export as JSON", () => download(`${fileName(talk)}.json`, "application/json", JSON.stringify(talk, null, 1))],
      ["Delete", async () => {
        await shelf.remove(talk.id);
        drop(talk.id);
        notice("Deleted.", async () => { await shelf.put(talk); listTalks(open, drop); });
      }],
    ]));
    return row;
  });
  $("conversations").replaceChildren(...rows);
  $("none-yet").hidden = rows.length > 0;
  $("for-all").hidden = rows.length === 0;
}

function closeMenu() {
  const menu = document.querySelector(".menu"), opener = menu?.parentElement.querySelector("[aria-expanded]");
  opener?.setAttribute("aria-expanded", "false");
  if (menu?.contains(document.activeElement)) opener.focus();
  menu?.remove();
  return Boolean(menu);
}

function toggleMenu(row, opener, choices) {
  const wasOpen = opener.getAttribute("aria-expanded") === "true";
  closeMenu();
  if (wasOpen) return;
  opener.setAttribute("aria-expanded", "true");
  row.append(make("div", "menu", ...choices.map(([name, work]) => button(name, "", () => { closeMenu(); work(); }))));
  row.lastChild.firstChild.focus();
}

function rename(row, title, talk) {
  const input = make("input");
  input.value = talk.title;
  input.ariaLabel = "Title";
  title.replaceWith(input);
  input.select();
  let isOver = false;
  const end = async (isKept) => {
    if (isOver) return;
    isOver = true;
    talk.title = isKept && input.value.trim() || talk.title;
    title.textContent = talk.title;
    input.replaceWith(title);
    if (isKept) await shelf.put(talk);
  };
  input.addEventListener("blur", () => end(true));
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.stopPropagation();
    end(event.key === "Enter");
    title.focus();
  });
}

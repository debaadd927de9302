// The page itself: the conversation that is shown, what is written, and the answer in progress.
let talking = newTalk(""), running = null, known = [], messages = new Map(), pictures = [], follows = true;

const model = () => known.find(({id}) => id === settings.model) || known[0];
const seesPictures = () => !model()?.input_modalities || model().input_modalities.includes("image");
const sends = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;

const act = {
  isRunning: (index) => running?.talk === talking && running.index === index,
  show(index) {
    talking.leaf = endOf(talking, index);
    layout();
    messages.get(index).article.querySelector(".versions button:enabled")?.focus();
    shelf.put(talking);
  },
  ask(text, images, parent = talking.leaf) {
    stop();
    talking.leaf = parent;
    addNode(talking, {role: "user", parent, text, images});
    answer();
  },
  again(index) {
    const {parent, text, problem, params} = talking.nodes[index], isSame = params.temperature === 0 && settings.temperature === "0";
    stop();
    if (problem && !text && index === talking.nodes.length - 1) {
      talking.nodes.pop();
      messages.delete(index);
    } else if (!problem && isSame) notice("At temperature 0 the answer is always the same. The settings have other temperatures.");
    talking.leaf = parent;
    answer();
  },
  // Decodes an answer once more without drafts, and tells how much longer it took.
  async compare(index, place) {
    if (running) return;
    const node = talking.nodes[index], talk = talking;
    const body = {model: node.model, messages: messagesOf(talk, node.parent, node.system), ...node.params, speculative: {method: "none"}};
    const mine = begin(talk, -1);
    try {
      const plain = await chat(body, mine.signal, ({tokens}) => { place.textContent = `plain: ${tokens.length} tokens`; });
      node.figures.plain = {pace: pace(plain), isSame: plain.text === node.text};
      shelf.put(talk);
    } catch (error) {
      if (error.name !== "AbortError") notice(error.message);
    }
    if (running === mine) end();
    if (talk === talking) messages.get(index)?.update();
  },
};

function begin(talk, index) {
  running = Object.assign(new AbortController(), {talk, index});
  document.body.classList.add("running");
  $("send").title = $("send").ariaLabel = "Stop";
  return running;
}

function end() {
  running = null;
  document.body.classList.remove("running");
  $("send").title = $("send").ariaLabel = "Send";
}

const stop = () => { running?.abort(); if (running) end(); };

// Answers the message at the end of the path.
async function answer() {
  const talk = talking, {system, leaf} = talk, params = parameters();
  const node = {role: "assistant", parent: leaf, text: "", reasoning: "", calls: [], tokens: [], end: "", model: model()?.id || "", params, system};
  const index = addNode(talk, node), mine = begin(talk, index);
  follows = true;
  layout();
  talk.changed = Date.now();
  shelf.put(talk).then(list);
  history.replaceState(null, "", `#${talk.id}`);
  announce("Answering");
  let saved = performance.now(), latest = null;
  const view = messages.get(index), draw = paced(() => {
    if (running !== mine) return;
    view.draw(true);
    scroll();
    if (performance.now() - saved > 3000) { saved = performance.now(); shelf.put(talk); }
  });
  try {
    if (!known.length) await findModels();
    if (model().loaded === false) notice("The model is loaded first, which takes a while.");
    node.model = model().id;
    latest = await chat({model: node.model, messages: messagesOf(talk, leaf), ...params}, mine.signal, (got) => {
      latest = got;
      node.tokens.push(...got.tokens.slice(node.tokens.length));
      Object.assign(node, {text: got.text, reasoning: got.reasoning, calls: got.calls, end: got.end});
      draw();
    });
  } catch (error) {
    if (error.name !== "AbortError") node.problem = {title: error.title || "The page failed", message: error.message};
    if (error.status === 401) $("key").focus();
  }
  if (latest?.tokens.length) node.figures = figuresOf(latest);
  if (running === mine) end();
  view.update(false);
  scroll();
  announce(node.problem ? node.problem.title : `The answer has ended: ${node.text.slice(0, 2000)}`);
  if (shelf.talks.has(talk.id)) shelf.put(talk).then(list);
  if (model()?.loaded === false) findModels().catch(() => {});
}

const scroll = () => { if (follows) $("chat").scrollTop = $("chat").scrollHeight; };

// The messages of the path, of which those that were shown before are kept.
function layout() {
  const path = pathOf(talking);
  for (const index of path) {
    if (messages.has(index)) continue;
    const kind = talking.nodes[index].role === "user" ? userMessage : answerMessage;
    messages.set(index, kind(talking, index, act));
  }
  $("messages").replaceChildren(...path.map((index) => messages.get(index).article));
  for (const index of path) messages.get(index).update();
  if (!path.length) $("chat").scrollTop = 0;
  $("opening").hidden = path.length > 0;
  document.body.classList.toggle("talks", path.length > 0);
  document.title = talking.title ? `${talking.title} – Paceline` : "Paceline";
  if (path.length) scroll();
}

function open(id) {
  const found = shelf.talks.get(id);
  stop();
  talking = found || newTalk(settings.system);
  messages = new Map();
  follows = true;
  $("system").value = talking.system;
  history.replaceState(null, "", found ? `#${id}` : location.pathname + location.search);
  document.body.classList.remove("listing");
  layout();
  list();
  if (!found && !matchMedia("(pointer: coarse)").matches) $("text").focus();
}
const list = () => listTalks(open, (id) => { if (id === talking.id) open(); else list(); });

async function findModels() {
  known = await models();
  settings.model = choices($("model"), known.map(({id}) => [id, id]), settings.model);
  document.body.classList.toggle("one-model", known.length < 2);
  $("model-name").textContent = known.length < 2 ? settings.model : "";
  useModel();
}

function useModel() {
  const drafters = (model()?.drafters || []).filter((name) => name !== "prediction").map((name) => [name, `${name} alone`]);
  settings.drafter = choices($("drafter"), [["", "the server's choice"], ...drafters, ["none", "off: plain decoding"]], settings.drafter);
  $("attach").hidden = !seesPictures();
  saveSettings();
}

async function addPictures(files) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  if (images.length && !seesPictures()) { notice("This model reads text alone."); return; }
  for (const file of images) {
    try { pictures.push(await picture(file)); } catch { notice(`${file.name || "This"} is no picture that the browser can read.`); }
  }
  showPictures();
}

function showPictures() {
  $("pictures").replaceChildren(...pictures.map((one) => {
    const remove = button(`Remove ${one.name}`, "close", () => { pictures = pictures.filter((other) => other !== one); showPictures(); });
    return make("figure", "", pictureOf(one), remove, ...(one.note ? [make("figcaption", "", one.note)] : []));
  }));
}

// On narrow screens, where the list lies over the conversation. Whether that changed anything.
function showList(isShown) {
  const changed = document.body.classList.contains("listing") !== isShown;
  document.body.classList.toggle("listing", isShown);
  if (changed) $(isShown ? "close-list" : "open-list").focus();
  return changed;
}

function grow() {
  $("text").style.height = "auto";
  $("text").style.height = `${Math.min($("text").scrollHeight, innerHeight / 4)}px`;
}

function submit() {
  const text = $("text").value.trim();
  if (!text && !pictures.length) return;
  act.ask(text, pictures);
  pictures = [];
  showPictures();
  $("text").value = "";
  grow();
}

// Of files; texts are the browser's business.
function drag(event) {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  document.body.classList.toggle("dropping", event.type === "dragover");
  if (event.type === "drop") addPictures(event.dataTransfer.files);
}

function listen() {
  $("ask").addEventListener("submit", (event) => { event.preventDefault(); if (running) stop(); else submit(); });
  $("text").addEventListener("keydown", (event) => { if (sends(event)) { event.preventDefault(); if (!running) submit(); } });
  $("text").addEventListener("input", grow);
  $("text").addEventListener("paste", (event) => {
    const {clipboardData: given} = event;
    if (given.getData("text/plain") || ![...given.files].some((file) => file.type.startsWith("image/"))) return;
    event.preventDefault();
    addPictures(given.files);
  });
  $("attach").addEventListener("click", () => $("image").click());
  $("image").addEventListener("change", () => { addPictures($("image").files).then(() => { $("image").value = ""; }); });
  for (const kind of ["dragover", "dragleave", "drop"]) document.addEventListener(kind, drag);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]") || closeMenu()) return;
    if (!showList(false)) stop();
  });
  document.addEventListener("click", (event) => {
    if (!event.target.closest(".menu, [aria-expanded]")) closeMenu();
    if (event.target.closest("[data-copies]")) copy(event.target.closest(".code").querySelector("code").textContent);
    if (event.target.closest("[data-prompt]")) { $("text").value = event.target.closest("[data-prompt]").dataset.prompt; grow(); submit(); }
  });
  $("chat").addEventListener("scroll", () => {
    follows = $("chat").scrollTop + $("chat").clientHeight > $("chat").scrollHeight - 40;
    $("latest").hidden = follows;
  });
  $("latest").addEventListener("click", () => { follows = true; scroll(); });
  for (const name of ["again", "again-too"]) $(name).addEventListener("click", () => open());
  $("open-list").addEventListener("click", () => showList(true));
  for (const name of ["close-list", "shade"]) $(name).addEventListener("click", () => showList(false));
  $("open-settings").addEventListener("click", () => $("settings").showModal());
  $("settings").addEventListener("click", (event) => { if (event.target === $("settings")) $("settings").close(); });
  $("export-all").addEventListener("click", () => {
    download("conversations.json", "application/json", JSON.stringify(shelf.sorted(), null, 1));
  });
  $("delete-all").addEventListener("click", async () => {
    if (!await confirmed("Delete all conversations from this browser?", "Delete all")) return;
    await shelf.clear();
    open();
  });
  $("key").addEventListener("change", () => findModels().catch(() => {}));
  $("model").addEventListener("change", () => { settings.model = $("model").value; useModel(); });
  $("system").addEventListener("input", () => { talking.system = settings.system = $("system").value; saveSettings(); });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden && running?.index >= 0) shelf.put(running.talk); else if (!document.hidden) shelf.load().then(list, () => {});
  });
}

async function start() {
  loadSettings();
  listen();
  bindSettings((name) => {
    const {keeps, theme, view} = settings;
    if (name === "keeps") $("private").textContent = keeps ? "Kept in this browser only." : "New messages are not kept: they end with this tab.";
    if (name === "theme") document.documentElement.dataset.theme = theme;
    if (name !== "view") return;
    document.body.dataset.view = view;
    for (const index of pathOf(talking)) messages.get(index)?.draw?.(act.isRunning(index));
  });
  findModels().catch((error) => { if (error.status !== 401) notice(`${error.title || "The models are unknown"}. ${error.message}`); });
  await shelf.open();
  open(location.hash.slice(1));
}
start();

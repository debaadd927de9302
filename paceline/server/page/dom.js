// Small things about the document. Texts become text nodes, never markup.
const $ = (id) => document.getElementById(id);

function make(tag, className = "", ...kids) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...kids);
  return element;
}

const icon = (name) => $("icons").content.querySelector(`[data-icon="${name}"]`).cloneNode(true);

// A button with an icon, whose name is read aloud and shown as a hint; or with a text.
function button(label, name, work) {
  const element = make("button", name ? "icon" : "quiet", name ? icon(name) : label);
  element.type = "button";
  if (name) element.title = element.ariaLabel = label;
  if (work) element.addEventListener("click", work);
  return element;
}

const number = (value, digits) => Number.isFinite(value) ? value.toFixed(digits) : "–";

// Said to all: shown for some seconds, and read aloud. undo: what a button there does.
function notice(text, undo) {
  const place = $("notice");
  place.replaceChildren(text);
  if (undo) place.append(button("Undo", "", () => { place.replaceChildren(); undo(); }));
  clearTimeout(notice.timer);
  notice.timer = setTimeout(() => place.replaceChildren(), undo || text.length > 40 ? 8000 : 3000);
}
const announce = (text) => { $("spoken").textContent = text; };

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // without HTTPS there is no clipboard, but for the old way
    const area = make("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  notice("Copied");
}

function download(name, type, text) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], {type}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

// Asks before something that cannot be taken back.
function confirmed(question, yes) {
  $("question").textContent = question;
  $("yes").textContent = yes;
  $("confirm").returnValue = "";
  $("confirm").showModal();
  return new Promise((done) => $("confirm").addEventListener("close", () => done($("confirm").returnValue === "yes"), {once: true}));
}

// From the tree of `parseMarkdown` to nodes, and how an answer that grows is drawn again: its last blocks alone, and of them
// only what changed, so that selections, scrolled code and the eye keep their place.

// put: adds a text to a place, given where in the source it begins.
function build(node, put) {
  if (node.text !== undefined) {
    const place = document.createDocumentFragment();
    put(place, node.text, node.at);
    return place;
  }
  const element = make(node.isFormula ? "code" : node.tag, node.isFormula ? "formula" : node.align);
  for (const kid of node.kids) element.append(build(kid, put));
  if (node.tag === "pre") return codeBlock(element, node.lang);
  if (node.tag === "a") return link(element, node);
  if (node.tag === "ol" && node.start !== 1) element.start = node.start;
  if (node.tag !== "table") return element;
  const scroller = make("div", "scroll", element);
  scroller.tabIndex = 0;
  return scroller;
}

function codeBlock(pre, language) {
  const code = make("code");
  code.append(...pre.childNodes);
  pre.append(code);
  pre.tabIndex = 0;
  const copier = button("Copy code", "copy");
  copier.dataset.copies = "code";
  return make("div", "code", make("div", "code-head", make("span", "", language || "text"), copier), pre);
}

// The address is shown unless the text is the address already, so that no link leads elsewhere than it says.
function link(element, {href, isImage}) {
  const said = element.textContent.trim();
  Object.assign(element, {href, title: href, target: "_blank", rel: "noopener noreferrer"});
  if (isImage) element.prepend("picture: ");
  const bare = (text) => text.replace(/^(?:https?:\/\/|mailto:)/i, "").replace(/\/$/, "");
  if (bare(said) === bare(href)) return element;
  const {host, pathname} = new URL(href);
  element.append(make("small", "target", host || pathname));
  return element;
}

const isSame = (one, other) => one.nodeName === other.nodeName && one.cloneNode(false).isEqualNode(other.cloneNode(false));

// Makes `place`'s children from the index `from` those of `fresh`, and leaves what is equal alone.
function patch(place, fresh, from = 0) {
  const wanted = [...fresh.childNodes];
  wanted.forEach((now, index) => {
    const old = place.childNodes[from + index];
    if (!old) place.append(now);
    else if (old.isEqualNode(now)) return;
    else if (old.nodeType === Node.TEXT_NODE && now.nodeType === Node.TEXT_NODE) old.data = now.data;
    else if (old.nodeType === Node.ELEMENT_NODE && isSame(old, now)) patch(old, now);
    else old.replaceWith(now);
  });
  while (place.childNodes.length > from + wanted.length) place.lastChild.remove();
}

// A growing text in Markdown. The blocks before the last two stay as they are until the end, which draws everything once more.
class Drawing {
  constructor(place, put) {
    Object.assign(this, {place, put, kept: 0, begin: 0});
  }

  update(source, isOpen) {
    if (!isOpen) this.kept = this.begin = 0;
    const blocks = parseMarkdown(source.slice(this.begin), this.begin, isOpen), fresh = document.createDocumentFragment();
    for (const block of blocks) fresh.append(build(block, this.put));
    patch(this.place, fresh, this.kept);
    if (isOpen && blocks.length > 2) {
      this.kept += blocks.length - 2;
      this.begin = blocks.at(-2).begin;
    }
  }
}

// Calls `work` at most once a frame, and less often where it takes long: drawing has a fifth of the time.
function paced(work) {
  let waiting = false, next = 0;
  const run = () => {
    const begin = performance.now();
    waiting = false;
    work();
    next = performance.now() + 4 * (performance.now() - begin);
  };
  return () => {
    if (waiting) return;
    waiting = true;
    setTimeout(() => requestAnimationFrame(run), Math.max(0, next - performance.now()));
  };
}

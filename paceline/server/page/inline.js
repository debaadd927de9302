// The marks within a paragraph: emphasis, code, links, escapes. One pass from left to right with a stack of open marks.
const SPECIAL = /[\\`*_~[\]!<&$]|https?:\/\//g;
const TARGET = /\(([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)(?: "[^"\n]*")?\)/y;
const BARE = /https?:\/\/[^\s<>"`]{1,2000}/y, ANGLED = /<((?:https?:\/\/|mailto:)[^\s<>]{0,2000})>/y, BREAK = /<br ?\/?>/iy;
const ENTITY = /&(?:#(\d{1,7})|#x([0-9a-f]{1,6})|(amp|lt|gt|quot|apos|nbsp));/iy;
const ENTITIES = {amp: "&", lt: "<", gt: ">", quot: "\"", apos: "'", nbsp: "\u00a0"};
const VERBATIM = [["$$", "$$"], ["\\(", "\\)"], ["\\[", "\\]"]];  // formulas stay as they were written

// Joined where it goes on.
function addText(kids, text, at) {
  const last = kids.at(-1);
  if (!text) return;
  if (last?.text !== undefined && last.at + last.text.length === at) last.text += text; else kids.push({text, at});
}

// The address if it may be opened, else null.
function safeAddress(address) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(address)) return null;
  try {
    return ["http:", "https:", "mailto:"].includes(new URL(address).protocol) ? address : null;
  } catch {
    return null;
  }
}

const matchAt = (pattern, text, at) => { pattern.lastIndex = at; return pattern.exec(text); };
const isWord = (one) => one !== undefined && /[\p{L}\p{N}]/u.test(one);
const isGap = (one) => one === undefined || /\s/.test(one);

function parseInline(lines, isOpen) {
  const text = lines.map((line) => line.text).join("\n"), starts = [0];
  for (const line of lines) starts.push(starts.at(-1) + line.text.length + 1);
  const frames = [{mark: "", size: 0, kids: []}], counts = {}, gone = {};  // gone: closing marks that come no more
  const ticks = new Map();  // from the length of a run of backticks to where such runs are, the next one last
  for (const run of text.matchAll(/`+/g)) {
    if (!ticks.has(run[0].length)) ticks.set(run[0].length, []);
    ticks.get(run[0].length).push(run.index);
  }
  for (const places of ticks.values()) places.reverse();
  const partial = isOpen ? /!?\[([^[\]\n]{0,200})\]\([^()\s]{0,500}$/.exec(text) : null;
  const end = partial ? partial.index : text.length;
  let line = 0;

  const top = () => frames.at(-1), isBracket = ({mark, isDead}) => (mark === "[" || mark === "!") && !isDead;
  const count = (frame, change) => { counts[frame.mark + frame.size] = (counts[frame.mark + frame.size] || 0) + change; };
  const say = (begin, stop, kids = top().kids) => {
    while (begin < stop) {
      while (starts[line + 1] <= begin) line++;
      const to = Math.min(stop, starts[line + 1]);
      addText(kids, text.slice(begin, to), lines[line].at + begin - starts[line]);
      begin = to;
    }
  };
  const move = (kids, place) => { for (const one of kids) if (one.text === undefined) place.push(one); else addText(place, one.text, one.at); };
  // Open marks above `frames[keep]` turn out to be text.
  const flatten = (keep) => {
    while (frames.length > keep + 1) {
      const {mark, size, at, kids, isDead} = frames.at(-1);
      if (!isDead) count(frames.at(-1), -1);
      frames.pop();
      addText(top().kids, mark === "!" ? "![" : mark.repeat(size), at);
      move(kids, top().kids);
    }
  };
  const open = (mark, size, begin) => {
    if (frames.length > MOST_MARKS) { say(begin, begin + size); return; }
    const place = [];
    say(begin, begin + 1, place);
    frames.push({mark, size, at: place[0].at, kids: []});
    count(top(), 1);
  };
  const wrapped = (mark, size, kids) => {
    if (mark === "~") return {tag: "del", kids};
    if (size === 3) return {tag: "em", kids: [{tag: "strong", kids}]};
    return {tag: size === 2 ? "strong" : "em", kids};
  };
  const fits = (frame, mark, size) => frame.mark === mark && (frame.size === size || mark !== "~" && (frame.size === 3 || size === 3));
  const isOpened = (mark, size) => [1, 2, 3].some((other) => counts[mark + other] && fits({mark, size: other}, mark, size));
  // What is left of a closing run of `size` marks.
  const close = (mark, size) => {
    while (size && isOpened(mark, size)) {
      flatten(frames.findLastIndex((frame) => fits(frame, mark, size)));
      const frame = top(), used = Math.min(size, frame.size);
      count(frame, -1);
      size -= used;
      frame.size -= used;
      frame.kids = [wrapped(mark, used, frame.kids)];
      if (frame.size) count(frame, 1); else { frames.pop(); move(frame.kids, top().kids); }
    }
    return size;
  };

  const readers = {
    "\\": (at) => {
      if (!/[!-/:-@[-`{-~\n]/.test(text[at + 1] || "")) return 0;
      if (text[at + 1] !== "\n") say(at + 1, at + 2);
      return text[at + 1] === "\n" ? 1 : 2;
    },
    "`": (at) => {
      const size = matchAt(/`+/y, text, at)[0].length, runs = ticks.get(size);
      while (runs.length && runs.at(-1) <= at) runs.pop();
      const stop = runs.at(-1) ?? (isOpen && size < 3 ? text.length : -1);
      if (stop < 0) { say(at, at + size); return size; }
      const isPadded = text[at + size] === " " && text[stop - 1] === " " && text.slice(at + size, stop).trim();
      const kids = [];
      say(at + size + (isPadded ? 1 : 0), stop - (isPadded ? 1 : 0), kids);
      if (kids.length) top().kids.push({tag: "code", kids});
      return stop + size - at;
    },
    "[": (at) => { open("[", 1, at); return 1; },
    "!": (at) => { if (text[at + 1] !== "[") return 0; open("!", 1, at); return 2; },
    "]": (at) => {
      if (!counts["[1"] && !counts["!1"]) return 0;
      const place = frames.findLastIndex(isBracket), target = matchAt(TARGET, text, at + 1);
      const href = target && safeAddress(target[1]);
      if (!href) { say(at, at + 1); flatten(place - 1); return 1; }
      flatten(place);
      const frame = frames.pop();
      count(frame, -1);
      for (const one of frames.filter(isBracket)) {  // no links in links
        count(one, -1);
        one.isDead = true;
      }
      top().kids.push({tag: "a", href, isImage: frame.mark === "!", kids: frame.kids});
      return 1 + target[0].length;
    },
    "<": (at) => {
      const link = matchAt(ANGLED, text, at), href = link && safeAddress(link[1]), rule = matchAt(BREAK, text, at);
      if (rule) { top().kids.push({tag: "br", kids: []}); return rule[0].length; }
      return href ? linkTo(href, at + 1, at + 1 + href.length) + 2 : 0;
    },
    "&": (at) => {
      const found = matchAt(ENTITY, text, at);
      if (!found) return 0;
      const code = found[1] ? parseInt(found[1]) : parseInt(found[2], 16), place = [];
      const numbered = () => code > 0 && code < 0x110000 ? String.fromCodePoint(code) : "\ufffd";
      say(at, at + 1, place);
      addText(top().kids, found[3] ? ENTITIES[found[3].toLowerCase()] : numbered(), place[0].at);
      return found[0].length;
    },
    "h": (at) => {
      const found = !counts["[1"] && !counts["!1"] && !isWord(text[at - 1]) && matchAt(BARE, text, at);
      if (!found) return 0;
      let href = found[0], open = href.split("(").length - href.split(")").length;
      for (;;) {
        const last = href.at(-1);
        if (last === ")" && open < 0) open++; else if (!".,;:!?'*_~]|".includes(last)) break;
        href = href.slice(0, -1);
      }
      return safeAddress(href) ? linkTo(href, at, at + href.length) : 0;
    },
  };
  function linkTo(href, begin, stop) {
    const kids = [];
    say(begin, stop, kids);
    top().kids.push({tag: "a", href, kids});
    return stop - begin;
  }
  function emphasis(at) {
    const mark = text[at], size = matchAt(/\*+|_+|~+/y, text, at)[0].length, before = text[at - 1], after = text[at + size];
    if (isOpen && at + size === end && size <= 3) {  // what it opens is not known yet
      close(mark, size);
      return size;
    }
    const isFit = (mark === "~" ? size === 2 : size <= 3) && !(/\d/.test(before) && /\d/.test(after));  // 3*2 is no mark
    const canOpen = isFit && !isGap(after) && (mark !== "_" || !isWord(before));
    const canClose = isFit && !isGap(before) && (mark !== "_" || !isWord(after));
    const left = canClose ? close(mark, size) : size;
    if (left && canOpen) open(mark, left, at + size - left); else say(at + size - left, at + size);
    return size;
  }
  function verbatim(at) {
    const pair = VERBATIM.find(([first]) => text.startsWith(first, at));
    if (!pair || gone[pair[1]]) return 0;
    const stop = text.indexOf(pair[1], at + 2), kids = [];
    if (stop < 0) { gone[pair[1]] = true; return 0; }
    say(at, stop + 2, kids);
    top().kids.push({tag: "span", isFormula: true, kids});
    return stop + 2 - at;
  }

  let at = 0;
  while (at < end) {
    const found = matchAt(SPECIAL, text, at), stop = found ? Math.min(found.index, end) : end;
    say(at, stop);
    at = stop;
    if (at === end) break;
    const one = text[at], used = "*_~".includes(one) ? emphasis(at) : "\\$".includes(one) && verbatim(at) || (readers[one]?.(at) || 0);
    if (!used) say(at, at + 1);
    at += used || 1;
  }
  while (isOpen && frames.length > 1 && "*_~".includes(top().mark)) {
    const frame = frames.pop();
    count(frame, -1);
    if (frame.kids.length) top().kids.push(wrapped(frame.mark, frame.size, frame.kids));
  }
  flatten(0);
  if (partial) say(partial.index + partial[0].indexOf("[") + 1, partial.index + partial[0].indexOf("]"));
  return frames[0].kids;
}

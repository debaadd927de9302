// Markdown to a tree of plain objects: a text is {text, at}, an element {tag, kids, ...}; `at` is where it begins in the source.
//
// As models write it rather than by the letter of CommonMark: line ends stay, HTML is text (but for <br>), lists nest from two
// blanks on; there are no underlined headings and no indented code. Nesting and columns have limits, and no step looks at the
// same text again and again, so that the time is linear in the length whatever the text is.
const DEEPEST = 8, MOST_MARKS = 16, MOST_COLUMNS = 64;
const FENCE = /^[ \t]*(`{3,}|~{3,})([^`]*)$/, HEADING = /^ {0,3}(#{1,6})(?=\s|$)/, RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/, ITEM = /^[ \t]*([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const ALIGNMENTS = {":-": "left", "-:": "right", "::": "center"};

const isBlank = (line) => !line.text.trim();
const cut = (line, count) => ({text: line.text.slice(count), at: line.at + count});

function indentOf(text) {
  let width = 0;
  for (const one of text) {
    if (one === " ") width += 1; else if (one === "\t") width += 4; else break;
  }
  return width;
}

// The line without at most `width` columns of its indent.
function outdented(line, width) {
  let count = 0;
  for (let gone = 0; gone < width && " \t".includes(line.text[count] || "x"); count++) gone += line.text[count] === "\t" ? 4 : 1;
  return cut(line, count);
}

function trimmed(line) {
  const begin = line.text.length - line.text.trimStart().length;
  return {text: line.text.trim(), at: line.at + begin};
}

function linesOf(source, at) {
  const lines = [];
  for (const text of source.split("\n")) {
    lines.push({text: text.endsWith("\r") ? text.slice(0, -1) : text, at});
    at += text.length + 1;
  }
  return lines;
}

// The blocks of a source that begins at `at`, each with `begin`. isOpen: more will follow, so marks that are not closed yet
// count as closed at the end instead of being shown.
function parseMarkdown(source, at = 0, isOpen = false) {
  return parseBlocks(linesOf(source, at), 0, isOpen);
}

function parseBlocks(lines, depth, isOpen) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    if (isBlank(lines[i])) { i++; continue; }
    const [block, next] = readBlock(lines, i, depth, isOpen);
    blocks.push({...block, begin: lines[i].at});
    i = next;
  }
  return blocks;
}

function startsBlock(text, depth) {
  if (FENCE.test(text) || HEADING.test(text) || RULE.test(text)) return true;
  const mark = depth < DEEPEST && ITEM.exec(text);
  return depth < DEEPEST && QUOTE.test(text) || mark && mark[0].length < text.length && (!/\d/.test(mark[1]) || parseInt(mark[1]) === 1);
}

function readBlock(lines, i, depth, isOpen) {
  const {text} = lines[i], isLast = (j) => isOpen && j === lines.length;
  const fence = FENCE.exec(text), heading = HEADING.exec(text);
  if (fence) return readFence(lines, i, fence, isOpen);
  if (heading) {
    const title = trimmed(cut(lines[i], heading[0].length));
    let length = title.text.length;
    while (title.text[length - 1] === "#") length--;
    if (!length || title.text[length - 1] === " ") title.text = title.text.slice(0, length).trimEnd();
    return [{tag: `h${heading[1].length}`, kids: parseInline([title], isLast(i + 1))}, i + 1];
  }
  if (RULE.test(text)) return [{tag: "hr", kids: []}, i + 1];
  if (depth < DEEPEST && QUOTE.test(text)) return readQuote(lines, i, depth, isOpen);
  if (depth < DEEPEST && ITEM.test(text)) return readList(lines, i, depth, isOpen);
  const table = readTable(lines, i, depth, isOpen);
  if (table) return table;
  let next = i + 1;
  while (next < lines.length && !isBlank(lines[next]) && !startsBlock(lines[next].text, depth) && !readTable(lines, next, depth, isOpen)) next++;
  return [{tag: "p", kids: parseInline(lines.slice(i, next), isLast(next))}, next];
}

const closes = (text, fence) => {
  const line = text.trim();
  return line.length >= fence[1].length && line === fence[1][0].repeat(line.length);
};

function readFence(lines, i, fence, isOpen) {
  const kids = [], indent = indentOf(lines[i].text);
  let next = i + 1;
  for (; next < lines.length && !closes(lines[next].text, fence); next++) {
    const line = outdented(lines[next], indent), isPartial = isOpen && next === lines.length - 1 && /^ *[`~]{1,2}$/.test(line.text);
    if (!isPartial) addText(kids, `${line.text}\n`, line.at);
  }
  return [{tag: "pre", lang: fence[2].trim().split(/\s/, 1)[0].slice(0, 40), kids}, Math.min(next + 1, lines.length)];
}

function readQuote(lines, i, depth, isOpen) {
  const inner = [];
  let next = i;
  for (; next < lines.length; next++) {
    const mark = QUOTE.exec(lines[next].text), isLazy = next > i && !isBlank(lines[next]) && !isBlank(inner.at(-1));
    if (mark) inner.push(cut(lines[next], mark[0].length));
    else if (isLazy && !startsBlock(lines[next].text, depth)) inner.push(lines[next]);
    else break;
  }
  return [{tag: "blockquote", kids: parseBlocks(inner, depth + 1, isOpen && next === lines.length)}, next];
}

function readList(lines, i, depth, isOpen) {
  const base = indentOf(lines[i].text), number = parseInt(ITEM.exec(lines[i].text)[1]), isOrdered = !Number.isNaN(number);
  const items = [];
  while (i < lines.length) {
    const mark = ITEM.exec(lines[i].text);
    if (!mark || RULE.test(lines[i].text) || indentOf(lines[i].text) >= base + 2 || /\d/.test(mark[1]) !== isOrdered) break;
    const inner = [cut(lines[i], mark[0].length)];
    let fence = FENCE.exec(inner[0].text);
    for (i++; i < lines.length; i++) {
      const line = lines[i], wasBlank = isBlank(inner.at(-1));
      if (isBlank(line)) { inner.push(line); continue; }
      if (indentOf(line.text) >= base + 2) inner.push(outdented(line, Math.max(mark[0].length - base, 2) + base));
      else if (fence || !wasBlank && !startsBlock(line.text, depth) && !ITEM.test(line.text)) inner.push(line);
      else break;
      const last = inner.at(-1).text;
      fence = fence ? (closes(last, fence) ? null : fence) : FENCE.exec(last);
    }
    items.push({tag: "li", kids: itemKids(parseBlocks(inner, depth + 1, isOpen && i === lines.length))});
  }
  return [{tag: isOrdered ? "ol" : "ul", start: number, kids: items}, i];
}

// The first paragraph of an item stands in it directly; [ ] and [x] become boxes.
function itemKids(blocks) {
  if (blocks[0]?.tag !== "p") return blocks;
  const [first, ...rest] = blocks, kids = [...first.kids], box = /^\[([ xX])\] /.exec(kids[0]?.text || "");
  if (box) kids[0] = {text: `${box[1] === " " ? "☐" : "☑"} ${kids[0].text.slice(4)}`, at: kids[0].at + 2};
  return [...kids, ...rest];
}

function cellsOf(line) {
  const row = trimmed(line), cells = [];
  let begin = row.text.startsWith("|") ? 1 : 0;
  for (let i = begin; i < row.text.length; i++) {
    if (row.text[i] === "\\") i++;
    else if (row.text[i] === "|") { cells.push(trimmed({text: row.text.slice(begin, i), at: row.at + begin})); begin = i + 1; }
  }
  if (begin < row.text.length) cells.push(trimmed({text: row.text.slice(begin), at: row.at + begin}));
  return cells;
}

function readTable(lines, i, depth, isOpen) {
  if (!lines[i].text.includes("|")) return null;
  const rest = lines.length - i, heads = cellsOf(lines[i]), marks = rest > 1 ? cellsOf(lines[i + 1]) : [];
  const isBegun = isOpen && lines[i].text.trim()[0] === "|" && (rest === 1 || rest === 2 && /^[-|: ]*$/.test(lines[i + 1].text));
  const isTable = marks.length === heads.length && marks.every((one) => /^:?-+:?$/.test(one.text));
  if (heads.length > MOST_COLUMNS || !(isTable || isBegun)) return null;
  const aligned = marks.map((one) => ALIGNMENTS[one.text[0] + one.text.at(-1)] || "");
  const cellOf = (tag) => (cell, k) => ({tag, align: aligned[k] || "", kids: parseInline([cell], isOpen)});
  const row = (cells, tag) => ({tag: "tr", kids: cells.slice(0, heads.length).map(cellOf(tag))});
  const isRow = ({text}) => text.includes("|") && !startsBlock(text, depth);
  const rows = [];
  let next = Math.min(i + 2, lines.length);
  for (; next < lines.length && isRow(lines[next]); next++) rows.push(row(cellsOf(lines[next]), "td"));
  return [{tag: "table", kids: [{tag: "thead", kids: [row(heads, "th")]}, {tag: "tbody", kids: rows}]}, next];
}

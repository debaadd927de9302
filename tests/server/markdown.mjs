// What the chat page makes of Markdown: the tree of inline.js and markdown.js, in folder argv[2], written as marks.
import { readFileSync } from "node:fs";

const source = ["inline", "markdown"].map((name) => readFileSync(`${process.argv[2]}/${name}.js`, "utf8")).join("");
const load = (text) => new Function(`"use strict";${text}; return parseMarkdown;`)();
const parse = load(source);
const failed = [];
let passed = 0;

const shown = (node) => {
  if (node.text !== undefined) return node.text;
  const { tag, lang, href, align, start } = node;
  const marks = [lang, href, align, node.isImage && "image", node.isFormula && "formula", start > 1 && start].filter(Boolean);
  return `<${[tag, ...marks].join(" ")}>${node.kids.map(shown).join("")}</>`;
};
const written = (text, isOpen = false, read = parse) => read(text, 0, isOpen).map(shown).join("");
const expect = (name, holds) => { if (holds) passed += 1; else failed.push(name); };
const is = (text, wanted, isOpen = false) => {
  const made = written(text, isOpen);
  expect(`${JSON.stringify(text)} is ${JSON.stringify(made)}, not ${JSON.stringify(wanted)}`, made === wanted);
};

// Blocks
is("# A #\n###### B\n#c", "<h1>A</><h6>B</><p>#c</>");
is("a\nb\n\nc", "<p>a\nb</><p>c</>");
is("***\n- - -\na\n---", "<hr></><hr></><p>a</><hr></>");
is("```py x\n<b>\n  *c*\n```\nd", "<pre py><b>\n  *c*\n</><p>d</>");
is("~~~~\n~~~\n~~~~", "<pre>~~~\n</>");
is("```\nnever closed", "<pre>never closed\n</>");
is("> a\nlazy\n> > b\n\nc", "<blockquote><p>a\nlazy</><blockquote><p>b</></></><p>c</>");
is("- a\n- b\n    - c\n\n      d\n- [ ] e\n- [x] f", "<ul><li>a</><li>b<ul><li>c<p>d</></></></><li>☐ e</><li>☑ f</></>");
is("3. a\n   - b\n4. c\n```\nd\n```\n5. e", "<ol 3><li>a<ul><li>b</></></><li>c</></><pre>d\n</><ol 5><li>e</></>");
is("1. a\n   ```\n   b\n\n   c\n   ```\n2. d", "<ol><li>a<pre>b\n\nc\n</></><li>d</></>");
is("a 2024. b\n2024. c", "<p>a 2024. b\n2024. c</>");
is("x\n| a | b |\n|:-|:-:|\n| 1 | \\| | 3 |\n| 2 |\n\ny",
  "<p>x</><table><thead><tr><th left>a</><th center>b</></></><tbody><tr><td left>1</><td center>|</></><tr><td left>2</></></></><p>y</>");
is("a | b\nc", "<p>a | b\nc</>");
is("a\r\nb\r\n", "<p>a\nb</>");

// Within a paragraph
is("*a* **b** ***c*** _d_ __e__ ~~f~~", "<p><em>a</> <strong>b</> <em><strong>c</></> <em>d</> <strong>e</> <del>f</></>");
is("*a **b** c*", "<p><em>a <strong>b</> c</></>");
is("snake_case_name 5 * 3 2*3*4 ** ~a~ **a* b_", "<p>snake_case_name 5 * 3 2*3*4 ** ~a~ **a* b_</>");
is("**a** **b:** c", "<p><strong>a</> <strong>b:</> c</>");
is("`a` ``b`c`` ` d ` `e", "<p><code>a</> <code>b`c</> <code>d</> `e</>");
is("\\*a\\* \\`b\\` \\q", "<p>*a* `b` \\q</>");
is("[a *b*](https://c.d/e_(f)) <https://g.h>", "<p><a https://c.d/e_(f)>a <em>b</></> <a https://g.h>https://g.h</></>");
is("https://i.j/k, (https://l.m)", "<p><a https://i.j/k>https://i.j/k</>, (<a https://l.m>https://l.m</>)</>");
is("[a](mailto:b@c.d \"title\") ![e](https://f.g/h.png) [i] [j](k)",
  "<p><a mailto:b@c.d>a</> <a https://f.g/h.png image>e</> [i] [j](k)</>");
is("[a [b](https://c.d) e](https://f.g)", "<p>[a <a https://c.d>b</> e](<a https://f.g>https://f.g</>)</>");
is("\\(a_1*b_2*\\) $$c_d_$$ costs $5 \\[ e", "<p><span formula>\\(a_1*b_2*\\)</> <span formula>$$c_d_$$</> costs $5 [ e</>");
is("&lt;b&gt; &amp;lt; &#65;&#x42; &nope; a<br>b<br/>", "<p><b> &lt; AB &nope; a<br></>b<br></></>");

// While it is written, marks that are not closed yet count as closed, and none flickers
is("**a", "<p><strong>a</></>", true);
is("**a*", "<p><strong>a</></>", true);
is("a **", "<p>a </>", true);
is("a `b", "<p>a <code>b</></>", true);
is("a [b](https://c", "<p>a b</>", true);
is("```js\na\n``", "<pre js>a\n</>", true);
is("| a | b |\n|-", "<table><thead><tr><th>a</><th>b</></></><tbody></></>", true);
is("**a\n\nb", "<p>**a</><p>b</>", true);

// Whatever is hostile is text, and addresses are those of the web and of mail
const all = (nodes) => nodes.flatMap((node) => [node, ...all(node.kids ?? [])]);
const hostile = [
  "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<svg/onload=alert(1)>", "<style>a{}</style>", "<!--",
  "<a href=\"javascript:alert(1)\">a</a>", "</p></div><iframe src=//a>", "<br onclick=alert(1)>",
];
for (const text of hostile) {
  const made = all(parse(`a ${text}\n> ${text}`));
  expect(text, made.every(({ tag }) => [undefined, "p", "blockquote"].includes(tag)) && made[1].text.trim() === `a ${text}`);
}
const schemes = [
  "javascript:alert(1)", "JAVASCRIPT:alert(1)", "java\tscript:alert(1)", "&#106;avascript:alert(1)", "javascript&colon;alert(1)",
  "data:text/html,a", "vbscript:a", "file:///etc/passwd", "//a.b", "/a", "#a", "blob:https://a", "https:a b", "http://", "https://[",
  "\u0001javascript:a", "view-source:https://a",
];
const isWeb = (text, read = parse) => all(read(text)).every(({ href }) => href === undefined || /^(?:https?:\/\/|mailto:)/i.test(href));
for (const scheme of schemes) {
  for (const text of [`[a](${scheme})`, `![a](${scheme})`, `<${scheme}>`, `[a](<${scheme}>)`, `[a]: ${scheme}`]) expect(text, isWeb(text));
}

// Every text says where it begins
const bare = (text) => text.replace(/\r?\n?$/, "");
const isPlaced = (text, read = parse) => all(read(text)).every((one) => one.tag || bare(text.slice(one.at, one.at + one.text.length)) === bare(one.text));
const nested = "# a\n\n- b\n  - *c*\n    d\n> e\n> f\n1. ```x\n   a\n   b\n   ```\n\n| a | **b** |\n|-|-|\n| `c` | d |\n\n**a *b* c** \\* [d](https://e)";
expect("places", isPlaced(nested));

// A text that grows is drawn as its parts are: the blocks before the last two do not change any more
const whole = `${nested}\n\n- d\n  - e\n\n\`\`\`x\ny\n\`\`\`\n> j\n\n1. k\n2. l\n\nm **n** [o](https://p.q) r\n`;
const after = parse(whole).map(shown);
for (let length = 1; length < whole.length; length++) {
  const before = parse(whole.slice(0, length), 0, true).slice(0, -2).map(shown);
  expect(`grown to ${JSON.stringify(whole.slice(0, length))}`, before.join("") === after.slice(0, before.length).join(""));
}

// The time is linear: texts of 100,000 characters, where each step may look at all others, would take minutes
const marks = [
  "*", "_a ", "**a ", "*a **b ", "***a", "~~a", "`", "`a``b", "[", "![", "](", "[a](", "[a](b ", "](a \"", "<", "<https://", "https://[",
  "&", "\\(", "$$a", "$$", "> ", "- ", "1. ", "  - a\n", "- a\n", "> a\n", "|", "|\n", "|-\n", "|a", "#", "# #", "a\n", "```\n", "```a\n",
  "| a | b |\n|---|---|\n", "\\", " ", "- - - - x\n", "*a_b~~c[d`e", "--- ", "(", "[a](https://b) ",
];
const size = 100_000, longest = 3000;
const stairs = Array.from({ length: 600 }, (_, i) => `${" ".repeat(2 * i)}- a\n`).join("");
const tails = [["# ", "#", "x"], ["-", " ", "x"], ["a", " ", "b"], ["[a](", "(", ""], ["[a](", "(a)", ""], ["](a", " ", ""]];
const ends = tails.map(([first, many, last]) => first + many.repeat(size / many.length) + last);
const depth = (nodes) => {
  let most = 0;
  for (const queue = nodes.map((node) => [node, 1]); queue.length;) {
    const [node, at] = queue.pop();
    most = Math.max(most, at);
    for (const kid of node.kids ?? []) queue.push([kid, at + 1]);
  }
  return most;
};
[...marks.map((one) => one.repeat(Math.ceil(size / one.length))), ...ends, stairs].forEach((text, index) => {
  const begin = performance.now();
  expect(`${JSON.stringify(text.slice(0, 20))} is nested too deep`, depth(parse(text, 0, index % 2 === 0)) < 60);
  const took = performance.now() - begin;
  expect(`${JSON.stringify(text.slice(0, 20))} took ${took} ms`, took < longest);
});

// Mutants, each of which must be noticed
const mutant = (from, to) => {
  if (!source.includes(from)) failed.push(`there is no ${from}`);
  return load(source.replace(from, () => to));
};
const anyScheme = mutant("if (!/^(?:https?:\\/\\/|mailto:)/i.test(address)) return null;", "return address;");
expect("a mutant that opens any address", schemes.some((scheme) => !isWeb(`[a](${scheme})`, anyScheme)));
const atZero = mutant("lines[line].at + begin - starts[line]", "begin");
expect("a mutant that forgets where lines begin", !isPlaced(nested, atZero));
const noLimit = mutant("frames.length > MOST_MARKS", "false");
expect("a mutant that nests without end", depth(noLimit("*a **b ".repeat(500) + "b** a* ".repeat(500))) > 60);

console.log(JSON.stringify({ passed, failed }));

// What the page asks of the server, which is the one that it came from.

const TITLES = {
  0: "The server cannot be reached", 401: "This server needs an API key", 404: "There is no such model", 413: "The message is too large",
  429: "The server is busy", 503: "The server is shutting down", 504: "The answer took too long",
};

// An error that a user can read.
class Problem extends Error {
  constructor(status, error = {}) {
    super(error.message || `The server answered with status ${status}.`);
    const isLong = error.code === "context_length_exceeded", other = status >= 500 ? "The server failed" : "The server refused the request";
    this.title = isLong ? "The conversation is too long for the model" : TITLES[status] || other;
    this.status = status;
  }
}

const brokenOff = (error) => Object.assign(new Problem(500, error), {title: "The answer broke off"});

async function ask(path, options = {}) {
  const headers = {"Content-Type": "application/json", ...($("key").value ? {Authorization: `Bearer ${$("key").value}`} : {})};
  let answer;
  try {
    answer = await fetch(path, {...options, headers});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, {message: "It does not run, or the connection was lost."});
  }
  if (answer.status === 401 || $("key").value) $("key-row").hidden = false;
  if (!answer.ok) throw new Problem(answer.status, (await answer.json().catch(() => ({}))).error);
  return answer;
}

const models = async () => (await (await ask("v1/models")).json()).data;

// The JSON of each event of a stream. Raises `Problem` where it breaks off.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {done, value} = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : brokenOff({message: "The connection was lost."});
    });
    if (done) throw brokenOff({message: "The connection was closed before the end of the answer."});
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice(part.indexOf("data: ") + 6));
    }
  }
}

// Asks for a chat, and gives `show` the answer so far after each event. Returns it.
// tokens: [text, origin, source] of each. own: those of the model itself, of which every pass gives one. early: those of the first event.
async function chat(body, signal, show) {
  const got = {
    text: "", reasoning: "", calls: [], tokens: [], own: 0, early: 0, begin: performance.now(), first: 0, last: 0, drafts: null, end: "",
  };
  const whole = JSON.stringify({...body, stream: true, return_provenance: true});
  const answer = await ask("v1/chat/completions", {method: "POST", body: whole, signal});
  for await (const event of events(answer.body)) {
    if (event.error) throw brokenOff(event.error);
    if (event.metrics) got.drafts = event.metrics.speculative_decoding;
    const choice = event.choices?.[0], delta = choice?.delta || {}, tokens = choice?.provenance || [];
    got.text += delta.content || "";
    got.reasoning += delta.reasoning_content || delta.reasoning || "";
    for (const call of delta.tool_calls || []) addCall(got.calls, call);
    got.end = choice?.finish_reason || got.end;
    if (tokens.length) {
      got.last = performance.now();
      if (!got.first) { got.first = got.last; got.early = tokens.length; }
    }
    for (const token of tokens) got.tokens.push([token.text, token.origin, token.source || ""]);
    got.own += tokens.filter((token) => token.origin !== "drafted").length;
    show(got);
  }
  return got;
}

// Calls of tools come whole, or their arguments in pieces.
function addCall(calls, {index = 0, function: {name, arguments: piece} = {}}) {
  calls[index] ??= {name: "", arguments: ""};
  calls[index].name ||= name || "";
  calls[index].arguments += piece || "";
}

// Tokens a second after the first event; nothing where there are too few to tell.
const pace = ({tokens, early, first, last}) => tokens.length > 8 && last > first ? 1000 * (tokens.length - early) / (last - first) : NaN;

// A picture as a data URI of at most `MOST_PIXELS` a side, and what was done to it. Raises where it is none.
const MOST_PIXELS = 1536;
async function picture(file) {
  const image = await createImageBitmap(file), scale = Math.min(1, MOST_PIXELS / Math.max(image.width, image.height));
  if (scale === 1 && /^image\/(?:png|jpeg|webp|gif)$/.test(file.type)) {
    const uri = await new Promise((done, fail) => {
      const reader = new FileReader();
      reader.onload = () => done(reader.result);
      reader.onerror = () => fail(reader.error);
      reader.readAsDataURL(file);
    });
    return {uri, name: file.name, note: ""};
  }
  const canvas = make("canvas");
  [canvas.width, canvas.height] = [image.width, image.height].map((side) => Math.max(1, Math.round(side * scale)));
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  const uri = file.type === "image/jpeg" ? canvas.toDataURL("image/jpeg", 0.92) : canvas.toDataURL("image/png");
  return {uri, name: file.name, note: `scaled from ${image.width} × ${image.height} to ${canvas.width} × ${canvas.height}`};
}

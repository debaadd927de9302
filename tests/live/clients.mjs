// The JavaScript clients of clients.py, which runs this in a folder whose node_modules has their packages.
// A line of JSON for each check: [what, error or null].
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const { z } = require("zod");
const [url, key, model] = [process.env.AT_URL, process.env.AT_KEY, process.env.AT_MODEL];
const rivers = "Name three rivers of Europe.";
const Weather = z.object({ city: z.enum(["Oslo", "Rome"]), is_warm: z.boolean() });

function assert(holds) {
  if (!holds) throw new Error(`nothing: ${holds}`);
}

async function joined(pieces, text) {
  let all = "";
  for await (const one of pieces) all += text(one) ?? "";
  return all;
}

function openai() {
  const OpenAI = require("openai");
  const { zodResponseFormat } = require("openai/helpers/zod");
  const chat = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 }).chat.completions;
  const asked = { model, seed: 1, messages: [{ role: "user", content: rivers }] };
  return {
    chat: async () => assert((await chat.create({ ...asked, max_tokens: 24 })).choices[0].message.content),
    stream: async () => {
      const pieces = await chat.create({ ...asked, max_tokens: 24, stream: true });
      assert(await joined(pieces, (one) => one.choices[0]?.delta?.content));
    },
    parse: async () => {
      const answer = await chat.parse({ ...asked, response_format: zodResponseFormat(Weather, "weather") });
      Weather.parse(answer.choices[0].message.parsed);
    },
    refusal: async () => {
      const error = await chat.create({ ...asked, model: "another" }).catch((one) => one);
      assert(error instanceof OpenAI.NotFoundError);
    },
  };
}

function ai() {
  const { generateText, streamText, generateObject, stepCountIs, tool } = require("ai");
  const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
  const server = createOpenAICompatible({
    name: "paceline", baseURL: url, apiKey: key, supportsStructuredOutputs: true, includeUsage: true,
  });
  const asked = { model: server(model), seed: 1, maxRetries: 0, prompt: rivers };
  const loop = {
    ...asked,
    maxOutputTokens: 200,
    tools: { weather: tool({ inputSchema: Weather, execute: async () => "20 degrees" }) },
    stopWhen: stepCountIs(3),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber < 2 ? "required" : "none" }),
  };
  const rounds = (steps) => assert(steps.map((one) => one.toolResults.length).join() === "1,1,0");
  return {
    generateText: async () => assert((await generateText({ ...asked, maxOutputTokens: 24 })).text),
    streamText: async () => {
      const answer = streamText({ ...asked, maxOutputTokens: 24 });
      assert(await joined(answer.textStream, (one) => one));
      assert((await answer.usage).outputTokens > 0);
    },
    generateObject: async () => Weather.parse((await generateObject({ ...asked, schema: Weather })).object),
    tools: async () => {
      const tools = { weather: tool({ inputSchema: Weather }) };
      Weather.parse((await generateText({ ...asked, toolChoice: "required", tools })).toolCalls[0].input);
    },
    "agent, two rounds": async () => rounds(await generateText(loop).then((one) => one.steps)),
    "agent, streams": async () => rounds(await streamText(loop).steps),
  };
}

function ollama() {
  const { Ollama } = require("ollama");
  const client = new Ollama({ host: url.replace(/\/v1$/, ""), headers: { Authorization: `Bearer ${key}` } });
  const messages = [{ role: "user", content: rivers }];
  const asked = { model, messages, options: { seed: 1, num_predict: 24 } };
  return {
    "list, show": async () => {
      assert((await client.list()).models[0].name === model);
      assert((await client.show({ model })).capabilities.includes("completion"));
    },
    chat: async () => assert((await client.chat(asked)).message.content),
    "stream, the same answer": async () => {
      const text = await joined(await client.chat({ ...asked, stream: true }), (one) => one.message.content);
      assert(text === (await client.chat(asked)).message.content);
    },
    generate: async () => assert((await client.generate({ model, prompt: rivers, options: asked.options })).response),
    structured: async () => {
      const options = { seed: 1, num_predict: 200 };
      const made = await client.chat({ model, messages, options, format: z.toJSONSchema(Weather) });
      Weather.parse(JSON.parse(made.message.content));
    },
    refusal: async () => {
      const error = await client.chat({ ...asked, model: "another" }).catch((one) => one);
      assert(error.status_code === 404);
    },
  };
}

function anthropic() {
  const Anthropic = require("@anthropic-ai/sdk").default;
  const client = new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: key, maxRetries: 0 });
  const asked = { model, max_tokens: 24, temperature: 0, messages: [{ role: "user", content: rivers }] };
  const tools = [{ name: "weather", input_schema: z.toJSONSchema(Weather) }];
  return {
    message: async () => assert((await client.messages.create(asked)).content[0].text),
    "stream, the same answer": async () => {
      const text = await client.messages.stream(asked).finalText();
      assert(text === (await client.messages.create(asked)).content[0].text);
    },
    "tools, in a stream": async () => {
      const body = { ...asked, max_tokens: 200, tools, tool_choice: { type: "any" } };
      const made = await client.messages.stream(body).finalMessage();
      assert(made.stop_reason === "tool_use");
      Weather.parse(made.content[0].input);
    },
    refusal: async () => {
      const error = await client.messages.create({ ...asked, model: "another" }).catch((one) => one);
      assert(error instanceof Anthropic.NotFoundError);
    },
  };
}

const clients = { openai, ai, ollama, "@anthropic-ai/sdk": anthropic };
for (const [what, check] of Object.entries(clients[process.argv[2]]())) {
  const error = await check().then(() => null, (one) => `${one}`);
  console.log(JSON.stringify([what, error]));
}

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

for (const [what, check] of Object.entries({ openai, ai }[process.argv[2]]())) {
  const error = await check().then(() => null, (one) => `${one}`);
  console.log(JSON.stringify([what, error]));
}

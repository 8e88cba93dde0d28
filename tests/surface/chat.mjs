// OpenAI's package for JavaScript in a conversation: a streamed answer and a whole one in turn.
// Arguments: base URL, model, JSON of {system, questions, session}. Prints {"turns": [...], "errors": [...]}.
import OpenAI from "openai";

const [baseURL, model, given] = process.argv.slice(2);
const { system, questions, session } = JSON.parse(given);
const client = new OpenAI({
  baseURL,
  apiKey: "none",
  maxRetries: 0,
  defaultHeaders: { "X-Session-ID": session },
});
const messages = [{ role: "system", content: system }];
const turns = [];
const errors = [];

async function streamed() {
  const stream = await client.chat.completions.create({
    model, messages, max_tokens: 24, temperature: 0, stream: true, stream_options: { include_usage: true },
  });
  let text = "";
  let told;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    told = chunk.kvloop ?? told;
  }
  return { text, told };
}

async function whole() {
  const { data, response } = await client.chat.completions
    .create({ model, messages, max_tokens: 24, temperature: 0 })
    .withResponse();
  const told = {
    identity: response.headers.get("x-kvloop-identity"),
    verdict: response.headers.get("x-kvloop-verdict"),
    reused_tokens: Number(response.headers.get("x-kvloop-reused-tokens")),
  };
  return { text: data.choices[0].message.content, told };
}

for (const [number, content] of questions.entries()) {
  messages.push({ role: "user", content });
  try {
    const { text, told } = await (number % 2 ? whole() : streamed());
    if (!text) throw new Error("an empty answer");
    messages.push({ role: "assistant", content: text });
    turns.push(told);
  } catch (error) {
    errors.push(`${error.constructor.name}: ${error.message}`);
    break;
  }
}
console.log(JSON.stringify({ turns, errors }));

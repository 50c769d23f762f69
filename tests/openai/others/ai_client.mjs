// Vercel's ai, unmodified: `node ai_client.mjs URL`. Loops of generateText and then streamText, of two providers.
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const baseURL = process.argv[2];
const name = (await (await fetch(`${baseURL}/models`)).json()).data[0].id;
let called = 0;
const weather = tool({
  description: 'The weather of a city.',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    called += 1;
    return `sunny in ${city}`;
  },
});
const models = [
  createOpenAI({ baseURL, apiKey: 'none' }).chat(name),
  createOpenAICompatible({ name: 'tandem', baseURL, includeUsage: true })(name),
];
for (const model of models) {
  const common = { model, tools: { weather }, stopWhen: stepCountIs(4), maxRetries: 0, maxOutputTokens: 200 };
  const asked = { role: 'user', content: 'What is the weather in Paris?' };
  const whole = await generateText({ ...common, system: 'Use tools.', messages: [asked] });
  console.log(whole.text);
  const again = [asked, ...whole.response.messages, { role: 'user', content: 'And now?' }];
  console.log(await streamText({ ...common, messages: again }).text);
}
console.log(called, 'calls');

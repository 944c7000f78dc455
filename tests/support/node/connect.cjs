// Calls a server by the Connect protocol, and prints what came as one line of JSON.
//
//   NODE_PATH=.../node_modules node connect.cjs URL FILE_OF_DESCRIPTORS
"use strict";

const { createClient, ConnectError, Code } = require("@connectrpc/connect");
const { createConnectTransport } = require("@connectrpc/connect-node");
const { createFileRegistry, fromBinary } = require("@bufbuild/protobuf");
const { FileDescriptorSetSchema } = require("@bufbuild/protobuf/wkt");
const fs = require("fs");

const [baseUrl, file] = process.argv.slice(2);
const registry = createFileRegistry(fromBinary(FileDescriptorSetSchema, fs.readFileSync(file)));

async function main(transport) {
  const client = (name) => createClient(registry.getService(`headway.v1.${name}`), transport);
  const texts = client("TextClassificationService");
  const generation = client("GenerationService");
  const parameters = { maxNewTokens: 8 };
  const found = {};
  let answer = await texts.classifyText({ texts: ["star goal atom"], topK: 1 });
  found.unary = answer.results.map((result) => result.labels[0].label);
  found.text = (await generation.generateText({ prompts: ["the cat"], parameters })).results[0].text;
  found.deltas = "";
  for await (const part of generation.streamGenerateText({ prompt: "the cat", parameters })) {
    found.deltas += part.textDelta;
  }
  const failure = async (call) => {
    try {
      await call();
      return null;
    } catch (error) {
      const known = ConnectError.from(error);
      const [detail] = known.findDetails(registry.getMessage("google.rpc.ErrorInfo"));
      return [Code[known.code], known.rawMessage, detail ? detail.reason : ""];
    }
  };
  found.refused = await failure(() => texts.classifyText({ texts: [] }));
  found.refusedStream = await failure(async () => {
    for await (const _ of generation.streamGenerateText({ prompt: "" })); // eslint-disable-line no-empty
  });
  found.late = await failure(() => generation.generateText({ prompts: ["the cat"], parameters: { maxNewTokens: 40 } }, { timeoutMs: 1 }));
  found.models = (await client("ModelService").listModels({})).models.length;
  return found;
}

const options = { baseUrl, httpVersion: "1.1" };
const transports = [
  createConnectTransport({ ...options, useBinaryFormat: true }),
  createConnectTransport({ ...options, useBinaryFormat: false }),
];
Promise.all(transports.map(main)).then((found) => console.log(JSON.stringify(found)));

// The call of a panel as commands of other programs.

import { address, key } from "./api.js";
import { copied, element, newId } from "./dom.js";

const GRPC = `${address.hostname}:${document.querySelector('meta[name="grpc-port"]').content}`;
const IS_ENCRYPTED = address.protocol === "https:";
const SHORTENED = 400; // characters of a value that nobody reads, such as an image

function shortened(value) {
  if (typeof value === "string" && value.length > SHORTENED) return `${value.slice(0, 24)}…`;
  if (Array.isArray(value)) return value.map(shortened);
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, shortened(each)]));
  }
  return value;
}

function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

function curl({ service, method, request, whole }) {
  const headers = "-H 'content-type: application/json'" + (key.get() ? ' -H "authorization: Bearer $HEADWAY_API_KEY"' : "");
  const body = quoted(JSON.stringify(shortened(whole ?? request)));
  const path = `headway.v1.${service}/${method.replace(/^Stream/, "")}`;
  return `${whole ? "# the same call without a stream\n" : ""}curl -s ${headers} \\\n  -d ${body} \\\n  ${address}${path}`;
}

function python({ service, method, request, whole }) {
  const module = service.replace(/(?<!^)([A-Z])/g, "_$1").toLowerCase();
  const name = method.replace(/(?<!^)([A-Z])/g, "_$1").toLowerCase();
  const metadata = key.get() ? ', metadata=[("x-api-key", os.environ["HEADWAY_API_KEY"])]' : "";
  const lines = [
    ...(key.get() ? ["import os", ""] : []),
    "import grpc",
    "from google.protobuf import json_format",
    `from headway.v1 import ${module}_pb2, ${module}_pb2_grpc`,
    "",
    `request = json_format.Parse(${JSON.stringify(JSON.stringify(shortened(request)))},`,
    `                            ${module}_pb2.${method}Request())`,
    `with grpc.${IS_ENCRYPTED ? "secure" : "insecure"}_channel("${GRPC}"${IS_ENCRYPTED ? ", grpc.ssl_channel_credentials()" : ""}) as channel:`,
    `    stub = ${module}_pb2_grpc.${service}Stub(channel)`,
    whole ? `    for message in stub.${method}(request${metadata}):\n        print(message)` : `    print(stub.${method}(request${metadata}))`,
  ];
  return `# or with headway-client: Client("${GRPC}"${IS_ENCRYPTED ? ", tls=True" : ""}).${name}(...)\n${lines.join("\n")}`;
}

function grpcurl({ service, method, request }) {
  const body = quoted(JSON.stringify(shortened(request)));
  return `grpcurl ${IS_ENCRYPTED ? "" : "-plaintext "}${key.get() ? '-H "x-api-key: $HEADWAY_API_KEY" ' : ""}-d ${body} \\\n  ${GRPC} headway.v1.${service}/${method}`;
}

/** Shows a call {service, method, request} as commands to copy; a streaming call has its unary request as `whole`. */
export function commands(call, title = "The call of this panel") {
  const kinds = [["curl", curl], ["Python", python], ["gRPC", grpcurl]];
  const code = element("code");
  const box = element("pre", { tabindex: "0", "aria-label": "The call as a command" }, code);
  const name = newId("commands");
  const choose = (write) => {
    code.textContent = write(call);
  };
  choose(curl);
  const tabs = kinds.map(([label, write], index) =>
    element(
      "label",
      {},
      element("input", { type: "radio", name, checked: index === 0, onchange: () => choose(write) }),
      ` ${label}`,
    ),
  );
  const copy = element(
    "button",
    {
      type: "button",
      onclick: async () => {
        copy.textContent = await copied(code.textContent).then(
          () => "Copied",
          () => "Select the text and copy it",
        );
        setTimeout(() => {
          copy.textContent = "Copy";
        }, 1500);
      },
    },
    "Copy",
  );
  return element(
    "details",
    { class: "commands" },
    element("summary", {}, title),
    element("fieldset", { class: "row" }, element("legend", { class: "spoken" }, "As"), ...tabs, copy),
    box,
  );
}

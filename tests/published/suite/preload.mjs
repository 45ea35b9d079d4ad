// For node --import, before MCP's conformance suite: it asks its questions of a gateway, where a resource has the URI
// runner:PLUGIN/URI. RUNNER_SUITE_PREFIX is what stands there before the URI.
import { register } from "node:module";

register("./hooks.mjs", import.meta.url);
const plain = globalThis.fetch;
globalThis.fetch = (url, options) => {
  const body = options?.body;
  return plain(url, typeof body === "string" ? { ...options, body: public_uris(body) } : options);
};

export function public_uris(text) {
  return text.replaceAll('"uri":"test:', `"uri":"${process.env.RUNNER_SUITE_PREFIX}test:`);
}

// Calls to the REST API of the server that this page came from.

const BASE = new URL("../", document.baseURI);
const KEY = "conductor.key";
const TIMEOUT_MS = 15000;

export class Refused extends Error {}  // a key is needed, or another one
export class Away extends Error {}     // the server cannot be reached

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export async function call(method, path, { signal } = {}) {
  const headers = { accept: "application/json" };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const limit = AbortSignal.timeout(TIMEOUT_MS);
  let response;
  let answer;
  try {
    response = await fetch(new URL(path, BASE), {
      method, headers, signal: signal ? AbortSignal.any([signal, limit]) : limit,
      credentials: "omit", cache: "no-store", redirect: "error",
    });
    answer = await response.json().catch((error) => {
      if (error instanceof SyntaxError) return null;
      throw error;
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Away("the server does not answer");
  }
  if (response.ok) return answer;
  const told = answer?.error?.message ?? `${method} ${path} answered ${response.status}`;
  if (response.status === 401 || response.status === 403) throw new Refused(told);
  if (response.status >= 502 && response.status <= 504 && !answer) throw new Away(told);
  throw new Error(told);
}

export const get = (path, options) => call("GET", path, options);

// The page: reads what the server has, and asks for its key where it wants one.

import { at, say } from "./element.js";
import { Backends, readModel } from "./backends.js";
import { Live } from "./live.js";
import { Profiles } from "./profile.js";
import { Request } from "./request.js";
import { events, failure, setKey } from "./server.js";

const BACKENDS_MS = 5000;

const backends = new Backends();
const request = new Request();
const profiles = new Profiles(backends);
const live = new Live();
let isKnown = false; // whether the model has been read
let isLocked = false;

async function read() {
  try {
    if (!isKnown) {
      const model = await readModel();
      request.take(model);
      profiles.take(model);
      isKnown = true;
      document.title = `${model.name} on the fused MLP server`;
    }
    await backends.read();
    document.documentElement.dataset.read = "yes";
  } catch (error) {
    if (isKnown) return;
    // Without a key the form below says what is asked for, in a reader's words.
    if (error.code === "unauthorized") say(at("model"), "What is served is shown to those who have its key.");
    else say(at("model"), failure(error), true);
  }
}

async function watch() {
  if (!document.hidden && !isLocked) await read();
  setTimeout(watch, BACKENDS_MS);
}

// A browser that follows a link sends no key, and would show the refusal.
function closeLinks() {
  for (const link of at("routes").querySelectorAll("a[href]")) {
    link.removeAttribute("href");
    link.setAttribute("role", "link");
    link.setAttribute("aria-disabled", "true");
  }
  at("routes-command").textContent = `curl -H 'X-API-Key: …' ${new URL("metrics", document.baseURI)}`;
  at("routes-reason").hidden = false;
}

events.addEventListener("locked", ({ detail: isRefused }) => {
  if (!isLocked || isRefused) say(at("key-reason"), isRefused ? "That is not this server's key." : "");
  if (isLocked) return;
  isLocked = true;
  closeLinks();
  at("key").hidden = false;
  at("key-field").focus();
  live.lock(true);
});

events.addEventListener("unlocked", () => {
  isLocked = false;
  at("key").hidden = true;
  live.lock(false);
  read().then(() => {
    // The focus went with the form; who has a keyboard alone goes on behind it, once the key has proved right.
    if (isKnown && !isLocked && document.activeElement === document.body) at("backends-title").focus();
  });
});

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = at("key-field");
  setKey(field.value.trim());
  field.value = "";
});

live.lock(false);
watch();

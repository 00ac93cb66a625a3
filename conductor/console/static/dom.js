// The little that is needed to build and to change the page. Text is always set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

export function attribute(element, name, value) {
  if (value === null || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

// Children of `parent` follow `items`: those of the same key are kept, with their focus, and told what is new.
export function keyed(parent, items, keyOf, make, update) {
  const kept = parent.keyed ?? new Map();
  const next = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = keyOf(item);
    const element = kept.get(name) ?? make(item);
    next.set(name, element);
    kept.delete(name);
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
  for (const element of kept.values()) element.remove();
  parent.keyed = next;
}

export function width(element, share) {
  const wanted = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  if (element.style.width !== wanted) element.style.width = wanted;
}

export function empty(title, says) {
  return h("div", { class: "panel empty" }, h("strong", {}, title), says);
}

let saidTimer;
export function say(message) {
  const place = document.getElementById("said");
  text(place, message);
  place.hidden = false;
  clearTimeout(saidTimer);
  saidTimer = setTimeout(() => { place.hidden = true; }, 5000);
}

// Resolves to whether it was wished for.
export function confirmed({ title, says, yes }) {
  const dialog = document.getElementById("confirm-dialog");
  text(document.getElementById("confirm-title"), title);
  text(document.getElementById("confirm-text"), says);
  const yesButton = document.getElementById("confirm-yes");
  text(yesButton, yes);
  return new Promise((resolve) => {
    const end = (answer) => () => {
      dialog.onclose = null;
      dialog.close();
      resolve(answer);
    };
    yesButton.onclick = end(true);
    document.getElementById("confirm-no").onclick = end(false);
    dialog.onclose = end(false);
    dialog.showModal();
  });
}

export const detail = {
  dialog: document.getElementById("detail"),
  show(title, body, onClose) {
    text(document.getElementById("detail-title"), title);
    document.getElementById("detail-body").replaceChildren(...[body].flat());
    this.dialog.onclose = onClose ?? null;
    if (!this.dialog.open) this.dialog.showModal();
    document.getElementById("detail-body").scrollTop = 0;
  },
  close() {
    if (this.dialog.open) this.dialog.close();
  },
};
document.getElementById("detail-close").addEventListener("click", () => detail.close());

// What was entered in a panel's form, kept in the tab's session storage for a reload, within bounds.
// An entry of another form is removed: another version of the page may have written it.

import { give } from "./images.js";

const MAX_FIELD = 32 * 1024; // characters of a field
const MAX_PICTURES = 2 * 1024 * 1024; // characters of all pictures together, in base64
const FORMS = "headway-form:";
const PICTURES = "headway-pictures:";

function write(key, value) {
  try {
    if (value) sessionStorage.setItem(key, value);
    else sessionStorage.removeItem(key);
  } catch {
    // The storage is full or forbidden: nothing is kept.
  }
}

/** Gives an entry to `take`. */
function recall(key, take) {
  try {
    const kept = sessionStorage.getItem(key);
    if (kept) take(JSON.parse(kept));
  } catch {
    write(key, null);
  }
}

function isPictures(control) {
  return control.type === "file" && control.accept === "image/*";
}

function valueOf(control) {
  return control.type === "checkbox" ? control.checked : control.value;
}

function keepFields(form, id) {
  const named = [...form.elements].filter((control) => control.name && control.type !== "file");
  const short = named.map((control) => [control.name, valueOf(control)]).filter(([, value]) => String(value).length <= MAX_FIELD);
  write(FORMS + id, JSON.stringify(short));
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

/** Keeps the pictures of an input, all or none of them. */
async function keepPictures(input, id) {
  const key = `${PICTURES}${id}:${input.name}`;
  write(key, null);
  const files = [...input.files];
  const others = Object.keys(sessionStorage).filter((each) => each.startsWith(PICTURES));
  const used = others.reduce((sum, each) => sum + sessionStorage.getItem(each).length, 0);
  if (!files.length || files.reduce((sum, { size }) => sum + size, 0) > ((MAX_PICTURES - used) * 3) / 4) return;
  const all = await Promise.all(files.map(async (file) => ({ name: file.name, url: await dataUrl(file) })));
  if (files.every((file, index) => input.files[index] === file)) write(key, JSON.stringify(all)); // others may have been chosen meanwhile
}

function fileOf({ name, url }) {
  const [, type, content] = /^data:([^;,]*)[^,]*,(.*)$/s.exec(url);
  return new File([Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0))], name, { type });
}

/** Puts a value into a control, tells the panel, and shows a control that is folded away. */
function put(control, value) {
  if (valueOf(control) === value || (control.options && ![...control.options].some((option) => option.value === value))) return;
  if (control.type === "checkbox") control.checked = value;
  else control.value = value;
  const folded = control.closest("details");
  if (folded && control.type !== "hidden") folded.open = true;
  for (const kind of ["input", "change"]) control.dispatchEvent(new Event(kind)); // which the form does not hear
}

/** Removes what was kept of all forms. */
export function forget() {
  for (const key of Object.keys(sessionStorage)) if (key.startsWith(FORMS) || key.startsWith(PICTURES)) write(key, null);
}

/** Fills a form with what was kept of it, and keeps its inputs from now on. */
export function remember(form, id) {
  recall(FORMS + id, (fields) => {
    for (const [name, value] of fields) {
      const control = form.elements.namedItem(name); // found anew: a choice may have changed the fields after it
      if (control?.name) put(control, value);
    }
  });
  for (const input of [...form.elements].filter(isPictures)) {
    recall(`${PICTURES}${id}:${input.name}`, (files) => give(input, files.map(fileOf), { isKept: true }));
  }
  for (const kind of ["input", "change"]) {
    form.addEventListener(kind, ({ target, detail }) => {
      if (isPictures(target) && kind === "change" && !detail?.isKept) keepPictures(target, id).catch(() => {});
      keepFields(form, id);
    });
  }
}

// Shows messages sent by the server, and reports failed requests. Error messages stay until closed.
(() => {
  const SHOWN_FOR_MS = 6000;
  const region = document.getElementById("toasts");
  if (!region) return;

  const close = (toast) => toast.remove();
  const show = (text, kind) => {
    const toast = document.createElement("div");
    toast.className = "toast";
    toast.dataset.kind = kind;
    const line = document.createElement("p");
    line.textContent = text;
    const button = document.createElement("button");
    button.className = "quiet";
    button.textContent = "Close";
    button.addEventListener("click", () => close(toast));
    toast.append(line, button);
    region.append(toast);
    if (kind !== "error") setTimeout(() => close(toast), SHOWN_FOR_MS);
  };

  // Screen readers announce only what is added after the page has loaded.
  for (const toast of [...region.children]) {
    close(toast);
    show(toast.textContent, "done");
  }
  document.addEventListener("gatehouse:toast", (event) => show(event.detail.text, event.detail.kind));
  document.addEventListener("htmx:response:error", (event) => {
    const { raw, status } = event.detail.ctx.response;
    const isHandled = raw.headers.has("hx-trigger") || raw.headers.has("hx-redirect") || status === 422;
    const outcome = status < 500 ? "Nothing was changed." : "Reload to see whether anything was changed.";
    if (!isHandled) show(`The server answered with an error (${status}). ${outcome}`, "error");
  });
  document.addEventListener("htmx:error", (event) => {
    if (!event.detail.ctx?.response) show("The appliance does not respond. Is it running?", "error");
  });
})();

// Opens the dialog when a form has been put into it, and empties it when it closes.
(() => {
  const dialog = document.getElementById("dialog");
  if (!dialog) return;
  let pressed = null;
  let typed = false;

  document.addEventListener("htmx:after:swap", (event) => {
    if (event.detail.ctx?.target !== dialog || dialog.open) return;
    typed = false;
    dialog.showModal();
    dialog.querySelector("input:not([type=hidden])")?.focus();
  });
  document.addEventListener("htmx:after:swap", () => {
    document.querySelector("[aria-invalid=true]")?.focus();
  });
  dialog.addEventListener("close", () => dialog.replaceChildren());
  dialog.addEventListener("input", () => (typed = true));
  dialog.addEventListener("pointerdown", (event) => (pressed = event.target));
  dialog.addEventListener("click", (event) => {
    // A click outside closes it, unless it began inside (a selection drawn too far) or would lose typed text or a secret.
    const beside = event.target === dialog && pressed === dialog;
    if (beside && !typed && !dialog.querySelector(".secret")) dialog.close();
  });
  dialog.addEventListener("cancel", (event) => {
    if (dialog.querySelector(".secret")) event.preventDefault();
  });
})();

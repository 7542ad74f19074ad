// Opens the dialog when htmx has loaded a form into it, and empties it when it closes.
(() => {
  const dialog = document.getElementById("dialog");
  if (!dialog) return;
  let pointerDownTarget = null;
  let hasInput = false;

  document.addEventListener("htmx:after:swap", (event) => {
    if (event.detail.ctx?.target !== dialog || dialog.open) return;
    hasInput = false;
    dialog.showModal();
    dialog.querySelector("input:not([type=hidden])")?.focus();
  });
  document.addEventListener("htmx:after:swap", () => {
    document.querySelector("[aria-invalid=true]")?.focus();
  });
  dialog.addEventListener("close", () => dialog.replaceChildren());
  dialog.addEventListener("input", () => (hasInput = true));
  dialog.addEventListener("pointerdown", (event) => (pointerDownTarget = event.target));
  dialog.addEventListener("click", (event) => {
    // A click on the backdrop closes it, unless it started inside (while selecting text) or would lose input or a secret.
    const isOnBackdrop = event.target === dialog && pointerDownTarget === dialog;
    if (isOnBackdrop && !hasInput && !dialog.querySelector(".secret")) dialog.close();
  });
  dialog.addEventListener("cancel", (event) => {
    if (dialog.querySelector(".secret")) event.preventDefault();
  });
})();

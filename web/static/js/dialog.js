// Opens the dialog when htmx has loaded a form into it, and empties it when it closes. If its form, or the button below a secret,
// loads a page, the focus returns to the link that opened the dialog, as it does when the dialog is closed.
(() => {
  const dialog = document.getElementById("dialog");
  if (!dialog) return;
  const FIRST = "input:not([type=hidden]), select, textarea, [data-copy]";
  let pointerDownTarget = null;
  let hasInput = false;
  let opener = null;

  document.addEventListener("htmx:after:swap", (event) => {
    if (event.detail.ctx?.target !== dialog || dialog.open) return;
    hasInput = false;
    opener = event.detail.ctx.sourceElement.getAttribute("href");
    dialog.showModal();
    dialog.querySelector(FIRST)?.focus();
  });
  document.addEventListener("htmx:after:swap", () => {
    document.querySelector("[aria-invalid=true]")?.focus();
    if (dialog.open && !dialog.contains(document.activeElement)) dialog.querySelector(`${FIRST}, button`)?.focus();
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

  addEventListener("pagehide", () => dialog.open && sessionStorage.setItem("dialog-opener", opener));
  const lastOpener = sessionStorage.getItem("dialog-opener");
  sessionStorage.removeItem("dialog-opener");
  if (lastOpener) document.querySelector(`main a[href="${CSS.escape(lastOpener)}"]`)?.focus();
})();

// Opens the dialog when a form has been put into it, and empties it when it closes.
(() => {
  const dialog = document.getElementById("dialog");
  if (!dialog) return;

  document.addEventListener("htmx:after:swap", (event) => {
    if (event.detail.ctx?.target !== dialog || dialog.open) return;
    dialog.showModal();
    dialog.querySelector("input:not([type=hidden])")?.focus();
  });
  document.addEventListener("htmx:after:swap", () => {
    document.querySelector("[aria-invalid=true]")?.focus();
  });
  dialog.addEventListener("close", () => dialog.replaceChildren());
  dialog.addEventListener("click", (event) => {
    // A shown secret goes only by its own button; other sheets also by a click beside them.
    if (event.target === dialog && !dialog.querySelector(".secret")) dialog.close();
  });
  dialog.addEventListener("cancel", (event) => {
    if (dialog.querySelector(".secret")) event.preventDefault();
  });
})();

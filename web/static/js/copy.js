// Copies the text of the element that a button refers to. Without clipboard access (plain HTTP) it selects the text. The result
// is shown on the button, and announced by a status element because screen readers do not read the button again.
(() => {
  const select = (element) => {
    const range = document.createRange();
    range.selectNodeContents(element);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
  };

  const statusOf = (button) => {
    const existing = button.parentElement.querySelector("[data-copy-status]");
    if (existing) return existing;
    const status = document.createElement("span");
    status.className = "visually-hidden";
    status.setAttribute("role", "status");
    status.dataset.copyStatus = "";
    button.after(status);
    return status;
  };

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const source = document.querySelector(button.dataset.copy);
    const status = statusOf(button);
    status.textContent = "";
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      select(source);
      button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    }
    status.textContent = button.textContent;
  });
})();

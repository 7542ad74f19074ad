// Copies the text that a button names. Without clipboard access (plain HTTP) it selects the text instead and says so on the
// button, and also next to it for screen readers, which do not read the button again.
(() => {
  const select = (element) => {
    const range = document.createRange();
    range.selectNodeContents(element);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
  };

  const statusBeside = (button) => {
    const known = button.parentElement.querySelector("[data-copy-status]");
    if (known) return known;
    const made = document.createElement("span");
    made.className = "unseen";
    made.setAttribute("role", "status");
    made.dataset.copyStatus = "";
    button.after(made);
    return made;
  };

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const source = document.querySelector(button.dataset.copy);
    const status = statusBeside(button);
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

// The key "/" moves the focus to the search field.
(() => {
  const isTextField = (element) => element.matches("input, select, textarea, [contenteditable]");

  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || isTextField(event.target)) return;
    const search = document.querySelector("[data-search]");
    if (!search) return;
    event.preventDefault();
    search.focus();
    search.select();
  });
})();

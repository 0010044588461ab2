// Applies the chosen theme before the page is drawn: `light`, `dark`, or none for that of the system.

try {
  const theme = localStorage.getItem("starling-theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // no storage
}

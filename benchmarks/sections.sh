# Sourced by scripts that measure in sections. `run_sections NAME...` calls `section NAME` for each, says how long it took,
# and adds the names of those that failed to `failed`.
failed=()
run_sections() {
  local name began
  for name; do
    echo "=== $name"
    began=$SECONDS
    section "$name" || failed+=("$name")
    echo "=== $name: $((SECONDS - began)) s"
  done
}

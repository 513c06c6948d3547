#!/bin/sh
# check-api.sh [BASELINE]: changes of the Swift package's API that break apps, since the tag of the last release. Intended changes are
# lines in swift/api-breakages.txt, as this command prints them. Before the first release the commit before is the baseline, and nothing fails.
set -eu
cd "$(dirname "$0")/.."
check() { swift package diagnose-api-breaking-changes "$1" --breakage-allowlist-path swift/api-breakages.txt; }

if baseline=${1:-$(git describe --tags --match 'v*' --abbrev=0 2>/dev/null)}; then
  echo "compared with $baseline"
  check "$baseline"
else
  echo "compared with the commit before, as there is no release yet"
  check HEAD~1 || echo "not released yet: changes are allowed"
fi

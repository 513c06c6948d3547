#!/bin/sh
# check-api.sh [BASELINE]: what has changed in the API of the Swift package so that apps no longer compile, since the tag of the last
# release, or without one since the commit before. Changes that are meant are lines in swift/api-breakages.txt, as this prints them.
set -eu
cd "$(dirname "$0")/.."
baseline=${1:-$(git describe --tags --match 'v*' --abbrev=0 2>/dev/null || git rev-parse HEAD~1)}
echo "compared with $baseline"
exec swift package diagnose-api-breaking-changes "$baseline" --breakage-allowlist-path swift/api-breakages.txt

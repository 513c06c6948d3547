#!/bin/sh
# After `swift test` in swift/MLXInferClient and examples/swift: checks what no build compiles. The catalogue of documentation must convert
# without warnings, and the types of its code, of the snippets and, where there is no SwiftUI, of the example's views must fit. SwiftUI and
# AppKit then are the declarations in swift/StandIns. Arguments are flags of the builds before, such as -Xswiftc -warnings-as-errors.
set -eu
swift=$(cd "$(dirname "$0")" && pwd)
root=${swift%/*}
package=$swift/MLXInferClient
catalogue=$package/Sources/MLXInferClient/MLXInferClient.docc
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
strict=
case "$*" in *-warnings-as-errors*) strict=-warnings-as-errors ;; esac

check() { swiftc -swift-version 6 $strict -typecheck -I "$package/.build/debug/Modules" "$@"; }

apple=
if [ "$(uname -s)" != Darwin ]; then
  for name in SwiftUI AppKit UniformTypeIdentifiers; do
    swiftc -swift-version 6 -parse-as-library -emit-module -module-name "$name" -I "$work" -o "$work/$name.swiftmodule" "$swift/StandIns/$name.swift"
  done
  apple="-I $work -Xfrontend -import-module -Xfrontend AppKit"
  check $apple -parse-as-library -module-name MenuBarChat "$root"/examples/swift/MenuBarChat/Sources/MenuBarChat/*.swift
fi

# AnyLanguageModel is a package that only the network has.
swiftc -swift-version 6 $strict -parse-as-library -emit-module -module-name AnyLanguageModel \
  -o "$work/AnyLanguageModel.swiftmodule" "$swift/StandIns/AnyLanguageModel.swift"
check -I "$work" -parse-as-library -module-name MLXInferAnyLanguageModel \
  "$root"/examples/swift/MLXInferAnyLanguageModel/Sources/MLXInferAnyLanguageModel/*.swift
echo "the provider for AnyLanguageModel compiles against its declarations"

for file in "$catalogue"/Resources/*.swift "$package"/Tests/MLXInferClientTests/Live/SnippetView.swift; do
  case $file in
    */ask-package.swift)
      mkdir -p "$work/Ask/Sources/Ask"
      cp "$file" "$work/Ask/Package.swift"
      cp "$catalogue/Resources/ask-1.swift" "$work/Ask/Sources/Ask/main.swift"
      ln -s "$root" "$work/Ask/mlxinfer"
      swift package --package-path "$work/Ask" show-dependencies >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
      ;;
    *[vV]iew*.swift | */chat-*.swift) check $apple -parse-as-library -module-name Tutorial "$file" ;;
    *) check $apple -module-name Tutorial "$file" ;;
  esac
done

docc=$(command -v docc || xcrun --find docc 2>/dev/null) || { echo "there is no docc here: the catalogue was not converted"; exit 0; }
(cd "$package" && swift package "$@" dump-symbol-graph >"$work/log" 2>&1) || { cat "$work/log"; exit 1; }
mkdir "$work/graph"
cp "$package"/.build/*/symbolgraph/MLXInferClient.symbols.json "$work/graph"
"$docc" convert "$catalogue" --additional-symbol-graph-dir "$work/graph" --fallback-display-name MLXInferClient \
  --fallback-bundle-identifier org.mlxinfer.MLXInferClient --ide-console-output --output-path "$work/out" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
# A list of parameters may leave out those whose names say everything.
if [ -n "$strict" ] && grep -E '(warning|error): ' "$work/log" | grep -v 'is missing documentation'; then exit 1; fi
for page in ask chat server; do test -s "$work/out/data/tutorials/mlxinferclient/$page.json"; done
echo "the documentation of MLXInferClient converts, and the code of its tutorials compiles"

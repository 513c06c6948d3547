#!/bin/sh
# bundle.sh [GROUP]: makes MenuBarChat.app in this folder; with an app group, such as ABCDE12345.chat, for the sandbox.
# IDENTITY is the name of a certificate for codesign, which a group needs; without one the app is signed for this Mac only.
set -eu
cd "$(dirname "$0")"
swift build -c release --product MenuBarChat
rm -rf MenuBarChat.app
mkdir -p MenuBarChat.app/Contents/MacOS
cp "$(swift build -c release --show-bin-path)/MenuBarChat" MenuBarChat.app/Contents/MacOS/
if [ $# -gt 0 ]; then
  sed "s/ABCDE12345.chat/$1/" Info.plist >MenuBarChat.app/Contents/Info.plist
  sed "s/ABCDE12345.chat/$1/" MenuBarChat.entitlements >.build/MenuBarChat.entitlements
  codesign --force --sign "${IDENTITY:--}" --entitlements .build/MenuBarChat.entitlements MenuBarChat.app
else
  sed /AppGroup/d Info.plist >MenuBarChat.app/Contents/Info.plist
  codesign --force --sign "${IDENTITY:--}" MenuBarChat.app
fi

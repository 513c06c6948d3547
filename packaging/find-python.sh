#!/bin/sh
# Prints the path of a Python for this machine, 3.10 or newer: python3 if it is one, else the newest that is found. Prints nothing without.
# A stock Mac has Python 3.9. On Apple silicon, a Python for Intel processors is passed over, as MLX has no wheels for it.
# PYTHON_DIRS are the directories to search after those of PATH, divided by colons.

dirs="$PATH:${PYTHON_DIRS-/opt/homebrew/bin:/usr/local/bin:$HOME/.local/bin:/Library/Frameworks/Python.framework/Versions/Current/bin}"

suits() {
    found=$("$1" -c 'import platform, sys; print("%d %s" % (sys.version_info >= (3, 10), platform.machine()))' 2>/dev/null) || return 1
    case "$(uname -s) $found" in
        "Darwin 1 arm64") return 0 ;;
        Darwin*) return 1 ;;
        *" 1 "*) return 0 ;;
        *) return 1 ;;
    esac
}

for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    rest="$dirs:"
    while [ -n "$rest" ]; do
        dir=${rest%%:*}
        rest=${rest#*:}
        if [ -n "$dir" ] && [ -x "$dir/$name" ] && suits "$dir/$name"; then
            echo "$dir/$name"
            exit 0
        fi
    done
done

managed=$(uv python find '>=3.10' 2>/dev/null) && suits "$managed" && echo "$managed"
exit 0

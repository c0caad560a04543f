# Sourced by the other scripts: find a Python, and make a virtual environment that matches this checkout.

# find_python VERSION... prints the first interpreter that runs and is one of the versions ("3.11", "3.12").
find_python() {
    local version candidate
    for version in "$@"; do
        for candidate in "python$version" "$HOME/.pyenv/versions/$version".*/bin/python python3; do
            if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
                command -v "$candidate"
                return 0
            fi
        done
    done
    return 1
}

# make_venv FOLDER PYTHON installs the package into FOLDER, unless it already holds just that.
make_venv() {
    local folder=$1 python=$2 wanted
    wanted="$("$python" -VV) $PWD $(cat pyproject.toml constraints.txt | sha256sum)"
    if [ -f "$folder/installed-from" ] && [ "$(cat "$folder/installed-from")" = "$wanted" ] &&
        "$folder/bin/python" -c 'import torch, liverun' 2>/dev/null; then
        return 0
    fi
    echo "installing into $folder with $("$python" -V); the first time takes some minutes" >&2
    rm -rf "$folder"
    if ! "$python" -m venv "$folder"; then
        echo "$python cannot make a virtual environment; on Debian and Ubuntu install python3-venv" >&2
        return 1
    fi
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
        --editable '.[test]' || return 1
    printf '%s' "$wanted" >"$folder/installed-from"
}

"""What runs inside a sandbox of the stand-in for one file operation, as the user who asked.

Alone, with nothing but an interpreter: the request is base64 of JSON in the first argument. What fails prints, as its
last line, the code that envd answers and why, and exits 1.
"""

import base64
import contextlib
import grp
import json
import os
import pwd
import shutil
import stat
import sys
from typing import Any, Dict, List


def entry(path: str) -> Dict[str, Any]:
    found = os.lstat(path)
    link = stat.S_ISLNK(found.st_mode)
    if link and os.path.exists(path):
        found = os.stat(path)
    owner, group = str(found.st_uid), str(found.st_gid)
    with contextlib.suppress(KeyError):
        owner, group = pwd.getpwuid(found.st_uid).pw_name, grp.getgrgid(found.st_gid).gr_name
    answer: Dict[str, Any] = {
        "name": os.path.basename(path),
        "type": "FILE_TYPE_DIRECTORY" if stat.S_ISDIR(found.st_mode) else "FILE_TYPE_FILE",
        "path": path,
        "size": str(found.st_size),
        "mode": stat.S_IMODE(found.st_mode),
        "permissions": stat.filemode(found.st_mode),
        "owner": owner,
        "group": group,
    }
    if link:
        answer.update(symlinkTarget=os.readlink(path), isSymlink=True)
    return answer


def walk(path: str, depth: int) -> List[Dict[str, Any]]:
    found: List[Dict[str, Any]] = []
    for name in sorted(os.listdir(path)):
        child = os.path.join(path, name)
        found.append(entry(child))
        if depth > 1 and os.path.isdir(child) and not os.path.islink(child):
            found += walk(child, depth - 1)
    return found


def do(what: str, path: str, request: Dict[str, Any]) -> Any:
    if what == "write":
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        return [{"name": os.path.basename(path), "type": "file", "path": path}]
    if what == "stat":
        return {"entry": entry(path)}
    if what == "list":
        return {"entries": walk(path, request["depth"] or 1)}
    if what == "make":
        if os.path.isdir(path):
            raise FileExistsError("exists already")
        os.makedirs(path)
        return {"entry": entry(path)}
    if what == "move":
        target = os.path.join(os.path.expanduser("~"), request["target"])
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.rename(path, target)
        return {"entry": entry(target)}
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)
    return {}


def main() -> None:
    request = json.loads(base64.b64decode(sys.argv[1]))
    path = os.path.join(os.path.expanduser("~"), os.path.expanduser(request["path"]))
    if request["what"] != "read":
        json.dump(do(request["what"], path, request), sys.stdout)
        return
    if os.path.isdir(path):
        raise IsADirectoryError("is a directory")
    with open(path, "rb") as file:
        shutil.copyfileobj(file, sys.stdout.buffer)


def code(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "not_found"
    if isinstance(error, FileExistsError):
        return "already_exists"
    return "permission_denied" if isinstance(error, PermissionError) else "invalid_argument"


try:
    main()
except OSError as error:
    sys.exit(f"{code(error)} {error}")

"""Compiles one CUDA C++ file to PTX with the NVRTC shared library and nothing else.

usage: nvrtc.py LIBNVRTC SOURCE.cu OUT.ptx OPTION...

The library needs neither a toolkit nor a device. Exit status 1 and the compiler's log on standard error if it refuses the source.
"""

import ctypes
import os
import sys


def main(library, source, out, *options):
    nvrtc = ctypes.CDLL(library)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(name, *arguments):
        code = getattr(nvrtc, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: {nvrtc.nvrtcGetErrorString(code).decode()}")

    def text(size_of, read):
        length = ctypes.c_size_t()
        call(size_of, program, ctypes.byref(length))
        buffer = ctypes.create_string_buffer(length.value)
        call(read, program, buffer)
        return buffer.value

    with open(source, "rb") as file:
        code = file.read()
    program = ctypes.c_void_p()
    name = os.path.basename(source).encode()
    call("nvrtcCreateProgram", ctypes.byref(program), code, name, 0, None, None)
    flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        call("nvrtcCompileProgram", program, len(options), flags)
    except RuntimeError as error:
        log = text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode(errors="replace")
        sys.exit(f"{error}\n{log}")
    log = text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode(errors="replace")
    if log.strip():
        print(log, file=sys.stderr)
    with open(out, "wb") as file:
        file.write(text("nvrtcGetPTXSize", "nvrtcGetPTX"))


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])

// A library to be loaded before a program: one of its calls that open or change files fails, or
// ends the process.
//
//   FAULT_ROOT   only files below this folder count
//   FAULT_AT     which call, counted from 0
//   FAULT_KIND   EIO, ENOSPC, DEATH (before the call) or DEATH_AFTER (a write is cut in half)
//   FAULT_FIRED  a file that is made when the fault happens
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

namespace {

constexpr int kMostFiles = 4096;
// Files below the root, for reading or writing, and its folders.
std::atomic<bool> watched[kMostFiles];
std::atomic<long> calls{0};

template <typename F>
F next(const char* name) {
    return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

const char* setting(const char* name) {
    const char* value = getenv(name);
    return value ? value : "";
}

bool counts(const char* path) {
    const char* root = setting("FAULT_ROOT");
    return *root && path && strncmp(path, root, strlen(root)) == 0;
}

enum class Fate { kGo, kFail, kDieAfter };

// Counts a call; says what becomes of it, with errno set where it fails.
Fate fate() {
    const char* at = setting("FAULT_AT");
    if (!*at || calls.fetch_add(1) != atol(at)) return Fate::kGo;
    int fired = next<int (*)(const char*, int, ...)>("open")(setting("FAULT_FIRED"), O_CREAT | O_WRONLY, 0666);
    if (fired >= 0) next<int (*)(int)>("close")(fired);
    std::string kind = setting("FAULT_KIND");
    if (kind == "DEATH") kill(getpid(), SIGKILL);
    if (kind == "DEATH_AFTER") return Fate::kDieAfter;
    errno = kind == "ENOSPC" ? ENOSPC : EIO;
    return Fate::kFail;
}

template <typename F>
int guarded(bool counted, F call) {
    Fate fate_of_it = counted ? fate() : Fate::kGo;
    if (fate_of_it == Fate::kFail) return -1;
    int result = call();
    if (fate_of_it == Fate::kDieAfter) kill(getpid(), SIGKILL);
    return result;
}

int opened(const char* name, const char* path, int flags, mode_t mode) {
    bool counted = counts(path);
    int file = guarded(counted, [&] {
        return next<int (*)(const char*, int, ...)>(name)(path, flags, mode);
    });
    if (file >= 0 && file < kMostFiles) watched[file] = counted;
    return file;
}

bool is_watched(int file) { return file >= 0 && file < kMostFiles && watched[file]; }

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = (flags & O_CREAT) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return opened("open", path, flags, mode);
}

int open64(const char* path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = (flags & O_CREAT) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return opened("open64", path, flags, mode);
}

ssize_t write(int file, const void* bytes, size_t count) {
    auto real = next<ssize_t (*)(int, const void*, size_t)>("write");
    Fate fate_of_it = is_watched(file) ? fate() : Fate::kGo;
    if (fate_of_it == Fate::kFail) return -1;
    if (fate_of_it == Fate::kDieAfter) {
        real(file, bytes, count / 2);
        kill(getpid(), SIGKILL);
    }
    return real(file, bytes, count);
}

int fsync(int file) {
    return guarded(is_watched(file), [&] { return next<int (*)(int)>("fsync")(file); });
}

int rename(const char* from, const char* to) {
    return guarded(counts(to), [&] { return next<int (*)(const char*, const char*)>("rename")(from, to); });
}

int link(const char* from, const char* to) {
    return guarded(counts(to), [&] { return next<int (*)(const char*, const char*)>("link")(from, to); });
}

int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) {
    using Call = int (*)(int, const char*, int, const char*, int);
    return guarded(counts(to), [&] { return next<Call>("linkat")(from_folder, from, to_folder, to, flags); });
}

int unlink(const char* path) {
    return guarded(counts(path), [&] { return next<int (*)(const char*)>("unlink")(path); });
}

int mkdir(const char* path, mode_t mode) {
    return guarded(counts(path), [&] { return next<int (*)(const char*, mode_t)>("mkdir")(path, mode); });
}

int rmdir(const char* path) {
    return guarded(counts(path), [&] { return next<int (*)(const char*)>("rmdir")(path); });
}

}  // extern "C"

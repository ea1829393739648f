#include "fiber.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator {
namespace {

// Sanitizers make frames larger; unused pages cost nothing.
constexpr std::size_t STACK_BYTES = 256 * 1024;
constexpr std::size_t GUARD_BYTES = 4096;

#if defined(__SANITIZE_ADDRESS__)
void begin_switch(void** shadow, const void* stack, std::size_t bytes) { __sanitizer_start_switch_fiber(shadow, stack, bytes); }
void end_switch(void* shadow, const void** stack, std::size_t* bytes) { __sanitizer_finish_switch_fiber(shadow, stack, bytes); }
void unpoison(const void* stack, std::size_t bytes) { __asan_unpoison_memory_region(stack, bytes); }
#else
void begin_switch(void**, const void*, std::size_t) {}
void end_switch(void*, const void**, std::size_t*) {}
void unpoison(const void*, std::size_t) {}
#endif

}  // namespace

Fiber::Fiber(Body body) : body_(body) {
    void* memory = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    // A page that faults below the stack: an overflow must not run into other memory.
    if (memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE) != 0) {
        std::fprintf(stderr, "cuda emulator: no memory for the stack of a waiting thread\n");
        std::abort();
    }
    stack_ = static_cast<char*>(memory);
    reset();
}

Fiber::~Fiber() { munmap(stack_, STACK_BYTES); }

void Fiber::reset() {
    unpoison(stack_ + GUARD_BYTES, STACK_BYTES - GUARD_BYTES);
    inside_shadow_ = nullptr;
    entered_ = false;
    getcontext(&inside_);
    inside_.uc_stack.ss_sp = stack_;
    inside_.uc_stack.ss_size = STACK_BYTES;
    inside_.uc_link = nullptr;
    // makecontext passes ints only.
    const auto self = reinterpret_cast<std::uintptr_t>(this);
    makecontext(&inside_, reinterpret_cast<void (*)()>(&Fiber::bottom), 2, unsigned(self >> 32), unsigned(self));
}

void Fiber::bottom(unsigned high, unsigned low) {
    Fiber& self = *reinterpret_cast<Fiber*>(std::uintptr_t(high) << 32 | low);
    end_switch(nullptr, &self.outside_stack_, &self.outside_bytes_);
    for (;;) {
        self.body_(self);
        self.leave();
    }
}

#if defined(__SANITIZE_ADDRESS__)

// The sanitizer takes a jump for an exit from functions, so contexts are swapped whole.
void Fiber::enter() {
    begin_switch(&outside_shadow_, stack_, STACK_BYTES);
    swapcontext(&outside_, &inside_);
    end_switch(outside_shadow_, nullptr, nullptr);
}

void Fiber::leave() {
    begin_switch(&inside_shadow_, outside_stack_, outside_bytes_);
    swapcontext(&inside_, &outside_);
    end_switch(inside_shadow_, &outside_stack_, &outside_bytes_);
}

#else

// A context swap asks the operating system for the signal mask every time, a jump does not: it is
// needed for the first entry only.
void Fiber::enter() {
    if (_setjmp(outside_point_) != 0) return;
    if (!entered_) {
        entered_ = true;
        setcontext(&inside_);
    }
    _longjmp(inside_point_, 1);
}

void Fiber::leave() {
    if (_setjmp(inside_point_) == 0) _longjmp(outside_point_, 1);
}

#endif

}  // namespace emulator

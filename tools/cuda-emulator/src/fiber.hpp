// A stack of its own that can be left and entered again.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>

namespace emulator {

struct Thread;

// Runs `body` once for each time it is entered while idle. After a fault the frames on it are
// dropped by `reset`.
class Fiber {
public:
    using Body = void (*)(Fiber&);

    explicit Fiber(Body body);
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    // Enters the fiber; returns when it leaves. Called outside of fibers only.
    void enter();
    // Leaves the fiber; returns when it is entered again. Called on this fiber only.
    void leave();
    // Forgets what was left standing on the stack: kernels hold nothing that needs a destructor.
    void reset();

private:
    static void bottom(unsigned high, unsigned low);

    Body body_;
    char* stack_;
    ucontext_t inside_, outside_;
    jmp_buf inside_point_, outside_point_;
    bool entered_ = false;
    // What the address sanitizer keeps for a stack that is not running.
    void* inside_shadow_ = nullptr;
    void* outside_shadow_ = nullptr;
    const void* outside_stack_ = nullptr;
    std::size_t outside_bytes_ = 0;
};

}  // namespace emulator

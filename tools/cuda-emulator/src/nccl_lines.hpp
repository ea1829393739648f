// Lines between ranks that are processes: a socket to each other rank, by the name of the group.
//
// A thread for each line takes in what comes, so that writes of all ranks at once go through.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

class Lines {
   public:
    // Called with the sender's rank and what it has sent; with no bytes once the line has ended.
    using Taken = std::function<void(int, std::vector<char>*)>;

    Lines(std::string group, int rank, int ranks, Taken taken)
        : group_(std::move(group)), rank_(rank), ranks_(ranks), taken_(std::move(taken)) {
        out_.assign(std::size_t(ranks), -1);
        listening_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const sockaddr_un own = name_of(rank);
        const auto* const address = reinterpret_cast<const sockaddr*>(&own);
        is_listening_ = bind(listening_, address, sizeof own) == 0;
        is_listening_ = is_listening_ && listen(listening_, ranks) == 0;
    }

    Lines(const Lines&) = delete;
    Lines& operator=(const Lines&) = delete;

    ~Lines() {
        end();
        for (std::thread& reader : readers_) reader.join();
        for (const int line : in_) close(line);
        for (const int line : out_)
            if (line >= 0) close(line);
        close(listening_);
    }

    // Connects all ranks; false once the group has ended.
    bool connect_all() {
        for (int to = 0; is_listening_ && to < ranks_; ++to)
            if (to != rank_ && !connect_to(to)) return false;
        while (is_listening_ && int(in_.size()) < ranks_ - 1)
            if (!accept_one()) return false;
        return is_listening_;
    }

    // Writes a message whole; false if the other rank has left.
    bool send_to(int to, const char* bytes, std::size_t len) {
        const std::uint64_t head = len;
        return put(out_[std::size_t(to)], reinterpret_cast<const char*>(&head), sizeof head) &&
               put(out_[std::size_t(to)], bytes, len);
    }

    // Has all waits of other threads return.
    void end() {
        ended_ = true;
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const int line : in_) shutdown(line, SHUT_RDWR);
        for (const int line : out_)
            if (line >= 0) shutdown(line, SHUT_RDWR);
    }

   private:
    // A name that no file has, so that nothing is left behind.
    sockaddr_un name_of(int rank) const {
        sockaddr_un name{};
        name.sun_family = AF_UNIX;
        const std::string text = "fusestep " + group_ + " " + std::to_string(rank);
        const std::size_t len = std::min(text.size(), sizeof name.sun_path - 1);
        std::memcpy(name.sun_path + 1, text.data(), len);
        return name;
    }

    bool connect_to(int to) {
        const sockaddr_un other = name_of(to);
        while (!ended_) {
            const int line = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
            if (connect(line, reinterpret_cast<const sockaddr*>(&other), sizeof other) == 0) {
                const std::lock_guard<std::mutex> lock(mutex_);
                out_[std::size_t(to)] = line;
                return put(line, reinterpret_cast<const char*>(&rank_), sizeof rank_);
            }
            close(line);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return false;
    }

    bool accept_one() {
        pollfd waited{listening_, POLLIN, 0};
        while (!ended_) {
            if (poll(&waited, 1, 5) <= 0) continue;
            const int line = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC);
            int from = -1;
            if (line < 0 || !get(line, reinterpret_cast<char*>(&from), sizeof from)) return false;
            const std::lock_guard<std::mutex> lock(mutex_);
            in_.push_back(line);
            readers_.emplace_back([this, line, from] { read_all(line, from); });
            return true;
        }
        return false;
    }

    void read_all(int line, int from) {
        std::uint64_t len = 0;
        while (get(line, reinterpret_cast<char*>(&len), sizeof len)) {
            std::vector<char> bytes(len);
            if (!get(line, bytes.data(), bytes.size())) break;
            taken_(from, &bytes);
        }
        taken_(from, nullptr);
    }

    static bool put(int line, const char* bytes, std::size_t len) {
        for (std::size_t done = 0; done < len;) {
            const ssize_t written = send(line, bytes + done, len - done, MSG_NOSIGNAL);
            if (written <= 0) return false;
            done += std::size_t(written);
        }
        return true;
    }

    static bool get(int line, char* bytes, std::size_t len) {
        for (std::size_t done = 0; done < len;) {
            const ssize_t read = recv(line, bytes + done, len - done, 0);
            if (read <= 0) return false;
            done += std::size_t(read);
        }
        return true;
    }

    std::string group_;
    int rank_, ranks_, listening_ = -1;
    bool is_listening_ = false;
    Taken taken_;
    std::atomic<bool> ended_{false};
    // Of what follows, which one thread fills and another may end.
    std::mutex mutex_;
    // Lines to other ranks by their number, and those from them.
    std::vector<int> out_, in_;
    std::vector<std::thread> readers_;
};

}  // namespace

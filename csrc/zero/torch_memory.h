// Device memory of torch's caching allocator, for what lives no longer than a step, and torch's own, of other streams.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <memory>
#include <string>

namespace zb {

// Memory belongs to the stream that was torch's current one when this was made or followed last: once its owner lets
// go, later work of that stream may get it, behind what the stream that is followed then has been given.
class TorchMemory : public std::enable_shared_from_this<TorchMemory> {
 public:
  explicit TorchMemory(const std::string& device);

  // Of the calling thread.
  void follow_current_stream();
  // Not zeroed. From any thread. Throws OutOfMemoryError when torch has nothing left to give back either.
  std::shared_ptr<std::byte> allocate(std::size_t bytes) const;
  // What the followed stream has been given so far comes before what the calling thread's current stream gets from now
  // on: a part of a model may compute in a stream of its own, and its backward does then, too.
  void lead_current_stream() const;
  // The other way round.
  void join_current_stream() const;
  // Joins, and the followed stream may read `memory` also after its owner let go. Autograd adds gradients up in the
  // stream in which the parameter was made known to it, whatever stream the model computes in.
  void take_over(const c10::DataPtr& memory) const;

  // Of memory that it ends just before. A caller may step, or run the next forward, in another stream than its
  // backward's, and the memory is used there too: torch learns of that stream when this ends.
  class Use {
   public:
    Use(std::shared_ptr<const TorchMemory> user, const c10::DataPtr& memory);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    std::shared_ptr<const TorchMemory> user_;
    const c10::DataPtr& memory_;
    c10::Stream first_;
  };

 private:
  c10::Device device_;
  c10::Stream stream_;
};

}  // namespace zb

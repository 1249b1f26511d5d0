// Hooks on autograd's gradient accumulation, in C++: a gradient goes into the flat buffer without touching Python.
#pragma once

#include <exception>
#include <memory>
#include <vector>

#include "zero/engine.h"
#include "zero/torch_gradient_guards.h"
#include "zero/torch_memory.h"

namespace at {
class Tensor;
}

namespace zb {

class GradientHooks {
 public:
  virtual ~GradientHooks() = default;
  // Takes the hooks off. Also done by the destructor.
  virtual void remove() noexcept = 0;

  // A forward begins.
  virtual void begin_forward() = 0;
  // Whether autograd's graph has come to use a trainable parameter of the unit since. Uses in graphs from before do not
  // count, which live on for as long as somebody holds their loss.
  virtual bool is_used(std::size_t unit) const = 0;
};

// Takes the first exception that a hook of any engine threw since the last call, with its type: autograd passes on only
// the text, to the engine whose backward runs.
std::exception_ptr take_hook_error() noexcept;

// Hooks parameter i of `tensors` as engine parameter `indices[i]`. The engine must outlive the hooks. `memory` follows
// the stream that the engine computes in; null where there are no streams. `guards` are those of `tensors`.
std::unique_ptr<GradientHooks> make_gradient_hooks(std::shared_ptr<Engine> engine,
                                                   std::shared_ptr<const TorchMemory> memory,
                                                   std::shared_ptr<GradientGuards> guards,
                                                   const std::vector<at::Tensor>& tensors,
                                                   const std::vector<std::size_t>& indices);

}  // namespace zb

// What `.grad` of trained parameters is while their gradients wait for a step.
//
// [Note: gradient guards]
// A window's gradients live in the engine, as shards of flat buffers, so `.grad` cannot hold them. Between a backward
// and its step it holds a guard: a tensor of the parameter's dtype and shape whose storage raises on touch and names
// the call to use. Before the core works on gradients or a forward begins, all guards are taken away, since compiled
// code would be compiled again for a parameter with a gradient, and a script that has put something in the place of a
// guard is noticed. A backward that is not the engine's takes the guards of the parameters that it reaches.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace zb {

class GradientGuards {
 public:
  // What a script has made of the guards since they were placed.
  enum class Found : unsigned char {
    kIntact,
    kNone,      // every `.grad` is None: the script has dropped the gradients
    kReplaced,  // some `.grad` is None, or another tensor
  };

  GradientGuards(std::vector<at::Tensor> parameters, std::vector<std::string> names);
  ~GradientGuards();
  GradientGuards(const GradientGuards&) = delete;
  GradientGuards& operator=(const GradientGuards&) = delete;

  // Gives every parameter its guard.
  void place();
  bool are_placed() const noexcept { return are_placed_; }
  // Leaves every `.grad` undefined.
  Found take();
  // Of the last take() that found some replaced: the name of the first, and whether its `.grad` was None.
  const std::string& replaced_name() const { return names_[replaced_]; }
  bool replaced_is_none() const noexcept { return replaced_is_none_; }
  // For a backward that reaches the parameter.
  void take_one(std::size_t index) noexcept;

 private:
  struct Guard {
    at::Tensor tensor;  // undefined while it is placed
    const c10::TensorImpl* pointer = nullptr;
    c10::intrusive_ptr<c10::StorageImpl> storage;
    bool is_taken = false;  // by a backward that was not the engine's
  };

  Guard make_guard(std::size_t index) const;
  // Where `gradient` is the parameter's guard.
  bool take_back(std::size_t index, at::Tensor& gradient) noexcept;

  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  std::vector<Guard> guards_;  // made when they are placed first
  std::size_t replaced_ = 0;
  bool replaced_is_none_ = false;
  bool are_placed_ = false;
};

}  // namespace zb

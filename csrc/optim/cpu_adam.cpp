#include <utility>

#include "optim/device_adam.h"

namespace zb {
namespace {

class CpuAdam final : public DeviceAdam {
 public:
  CpuAdam(std::size_t thread_num, std::vector<int> cpus) : pool_(thread_num, std::move(cpus)) {}

  void update(Lane, std::span<const AdamRun> runs, const StepScalars* step) override {
    if (step->is_skipped != 0) return;
    for (const AdamRun& run : runs) {
      AdamScalars scalars = run.scalars;
      scalars.grad_factor = step->factor;
      adam_step(run.span, scalars, pool_);
    }
  }

  void read_masters(Lane, const AdamSpan& span, float* destination) override { zb::read_masters(span, destination); }
  void write_masters(Lane, const AdamSpan& span, const float* source) override { zb::write_masters(span, source); }
  void copy_magnitudes(Lane, float* destination, const float* source, const float* signs, std::size_t numel) override {
    zb::copy_magnitudes(destination, source, signs, numel);
  }

 private:
  ThreadPool pool_;
};

}  // namespace

std::shared_ptr<DeviceAdam> make_cpu_adam(std::size_t thread_num, std::vector<int> cpus) {
  return std::make_shared<CpuAdam>(thread_num, std::move(cpus));
}

}  // namespace zb

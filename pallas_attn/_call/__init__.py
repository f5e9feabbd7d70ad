"""From the public function to the kernel: checks, dispatch, configs, device, FFI."""

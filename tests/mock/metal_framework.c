/* The library Metal beside the mock's libobjc.A.dylib: its one function. */
#define EXPORT __attribute__((visibility("default")))

extern void *mock_copy_devices(void);

EXPORT void *MTLCopyAllDevices(void) { return mock_copy_devices(); }

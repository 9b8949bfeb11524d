// A program's start. Until 2.33 the C library's start called a function of the program's that ran the program's constructors;
// since 2.34 it runs them itself when it is given none, which an older one would take for a program without constructors. Linked
// with --wrap=__libc_start_main, whose caller is the compiler's crt1.o.
typedef int Main(int, char**, char**);
typedef void Constructor(int, char**, char**);
typedef void Function(void);

extern Constructor* __init_array_start[] __attribute__((visibility("hidden")));
extern Constructor* __init_array_end[] __attribute__((visibility("hidden")));

int __real___libc_start_main(Main* main, int argc, char** argv, Constructor* init, Function* fini, Function* loader_fini,
                             void* stack);

static void run_constructors(int argc, char** argv, char** environment) {
  for (Constructor** one = __init_array_start; one != __init_array_end; ++one) (*one)(argc, argv, environment);
}

int __wrap___libc_start_main(Main* main, int argc, char** argv, Constructor* init, Function* fini, Function* loader_fini,
                             void* stack) {
  (void)init;
  return __real___libc_start_main(main, argc, argv, run_constructors, fini, loader_fini, stack);
}

# make install: headers, both libraries, the CLI and its manual, flashback.pc and the CMake package.

include(CMakePackageConfigHelpers)

install(TARGETS flashback_shared flashback_static EXPORT flashback)
install(DIRECTORY include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
if(TARGET flashback)
    install(TARGETS flashback)
    install(FILES man/flashback.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
endif()

# In a wheel the library is a plain file beside the modules: wheels have no links, and nobody links against it there.
if(FLASHBACK_PYTHON)
    install(PROGRAMS $<TARGET_FILE:flashback_shared> DESTINATION flashback_attention COMPONENT python
            RENAME libflashback${CMAKE_SHARED_LIBRARY_SUFFIX})
endif()

# A library by name becomes -lname; a path or an option stays as it is.
set(pc_libs_private "")
foreach(library IN LISTS library_needs)
    if(NOT library MATCHES "^[/-]")
        string(PREPEND library "-l")
    endif()
    string(APPEND pc_libs_private " ${library}")
endforeach()
# Relative to where flashback.pc lies, so that the tree may be installed or moved anywhere.
file(RELATIVE_PATH pc_includedir ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_FULL_INCLUDEDIR})
configure_file(cmake/flashback.pc.in flashback.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/flashback.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flashback)
configure_package_config_file(cmake/flashback-config.cmake.in flashback-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(flashback-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/flashback-config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/flashback-config-version.cmake DESTINATION ${package_dir})
install(EXPORT flashback NAMESPACE flashback:: FILE flashback-targets.cmake DESTINATION ${package_dir})

#if canImport(Darwin)
    import Darwin
#elseif canImport(Glibc)
    import Glibc
#elseif canImport(Musl)
    import Musl
#endif

/// What differs between Darwin, glibc and musl, and the calls whose names are taken inside of types that use them.
enum System {
    #if canImport(Darwin)
        static let stream = SOCK_STREAM
        static let sendFlags: Int32 = 0
    #elseif canImport(Glibc)
        static let stream = Int32(SOCK_STREAM.rawValue)
        static let sendFlags = Int32(MSG_NOSIGNAL)
    #else
        static let stream = SOCK_STREAM
        static let sendFlags = Int32(MSG_NOSIGNAL)
    #endif

    /// The most bytes that the path of a Unix socket may have, without the zero behind it.
    static let pathLimit = MemoryLayout.size(ofValue: sockaddr_un().sun_path) - 1

    static var lastError: Int32 { errno }

    static func connectSocket(_ descriptor: Int32, _ address: UnsafePointer<sockaddr>, _ length: socklen_t) -> Int32 {
        connect(descriptor, address, length)
    }

    static func closeDescriptor(_ descriptor: Int32) { _ = close(descriptor) }

    static func sendBytes(_ descriptor: Int32, _ bytes: UnsafeRawBufferPointer) -> Int {
        send(descriptor, bytes.baseAddress, bytes.count, sendFlags)
    }

    static func receiveBytes(_ descriptor: Int32, _ buffer: UnsafeMutableRawBufferPointer) -> Int {
        recv(descriptor, buffer.baseAddress, buffer.count, 0)
    }

    /// What an error number means, for people.
    static func reason(_ number: Int32) -> String { String(cString: strerror(number)) }

    /// Lets a descriptor neither block nor leak into child processes, nor raise SIGPIPE where that is a socket's setting.
    static func prepare(_ descriptor: Int32, isSocket: Bool = true) {
        _ = fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK)
        _ = fcntl(descriptor, F_SETFD, FD_CLOEXEC)
        #if canImport(Darwin)
            if isSocket { set(descriptor, SOL_SOCKET, SO_NOSIGPIPE) }
        #endif
    }

    /// Sends small writes of a TCP socket at once.
    static func sendAtOnce(_ descriptor: Int32) { set(descriptor, Int32(IPPROTO_TCP), TCP_NODELAY) }

    /// The error of a connection attempt that has just ended.
    static func pendingError(_ descriptor: Int32) -> Int32 {
        var value: Int32 = 0
        var length = socklen_t(MemoryLayout<Int32>.size)
        return getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &value, &length) == 0 ? value : errno
    }

    private static func set(_ descriptor: Int32, _ level: Int32, _ option: Int32) {
        var on: Int32 = 1
        _ = setsockopt(descriptor, level, option, &on, socklen_t(MemoryLayout<Int32>.size))
    }
}

#if canImport(Darwin)
    import Darwin
#elseif canImport(Glibc)
    import Glibc
#elseif canImport(Musl)
    import Musl
#endif

/// An address to connect to, as the system's calls take it.
struct SocketAddress {
    let family: Int32
    private let bytes: [UInt8]

    /// The address of a Unix socket.
    ///
    /// - Throws: ``MLXInferError/socketPathTooLong(path:limit:)``.
    init(path: String) throws {
        let name = Array(path.utf8)
        guard name.count <= System.pathLimit else { throw MLXInferError.socketPathTooLong(path: path, limit: System.pathLimit) }
        guard !name.isEmpty, !name.contains(0) else { throw MLXInferError.invalidRequest("not the path of a socket: \(path)") }
        var address = sockaddr_un()
        #if canImport(Darwin)
            address.sun_len = UInt8(MemoryLayout<sockaddr_un>.size)
        #endif
        address.sun_family = sa_family_t(AF_UNIX)
        withUnsafeMutableBytes(of: &address.sun_path) { $0.copyBytes(from: name) }
        family = AF_UNIX
        bytes = withUnsafeBytes(of: &address) { Array($0) }
    }

    private init(_ info: addrinfo) {
        family = info.ai_family
        bytes = Array(UnsafeRawBufferPointer(start: info.ai_addr, count: Int(info.ai_addrlen)))
    }

    /// The addresses of a host, in the order in which they should be tried.
    ///
    /// - Throws: ``MLXInferError/connectionFailed(_:)`` where the name is not known.
    static func resolve(host: String, port: UInt16) throws -> [SocketAddress] {
        var hints = addrinfo()
        hints.ai_family = AF_UNSPEC
        hints.ai_socktype = System.stream
        var list: UnsafeMutablePointer<addrinfo>?
        let status = getaddrinfo(host, String(port), &hints, &list)
        guard status == 0 else { throw MLXInferError.connectionFailed("\(host): \(String(cString: gai_strerror(status)))") }
        defer { freeaddrinfo(list) }
        return sequence(first: list) { $0?.pointee.ai_next }.prefix { $0 != nil }.compactMap { $0.map { SocketAddress($0.pointee) } }
    }

    func withPointer<Result>(_ body: (UnsafePointer<sockaddr>, socklen_t) -> Result) -> Result {
        var storage = sockaddr_storage()
        withUnsafeMutableBytes(of: &storage) { $0.copyBytes(from: bytes) }
        return withUnsafePointer(to: &storage) { pointer in
            pointer.withMemoryRebound(to: sockaddr.self, capacity: 1) { body($0, socklen_t(bytes.count)) }
        }
    }
}

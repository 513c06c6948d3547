import Foundation

@testable import MLXInferClient

#if canImport(Darwin)
    import Darwin
#elseif canImport(Glibc)
    import Glibc
#elseif canImport(Musl)
    import Musl
#endif

/// A server that does to each connection what a script says, however wrong that is. `@unchecked`, because `lock` guards all that changes.
final class FaultServer: @unchecked Sendable {
    enum Step {
        /// Reads a request to the end of its body.
        case read
        case send([UInt8])
        /// Sends each byte by itself.
        case drip([UInt8])
        case pause(Duration)
        /// Does nothing more until the client closes the connection.
        case hold
    }

    let path: String
    private let lock = NSLock()
    private var scripts: [[Step]]
    private var received: [String] = []
    private var leftAt: [ContinuousClock.Instant] = []
    private var sentAt: [ContinuousClock.Instant] = []
    private let listener: Int32

    /// - Parameter scripts: one for each connection, in order; the last one is for all later ones as well.
    init(_ scripts: [Step]..., path: String = FaultServer.freshPath()) throws {
        (self.path, self.scripts) = (path, scripts)
        listener = socket(AF_UNIX, System.stream, 0)
        let address = try SocketAddress(path: path)
        guard address.withPointer({ bind(listener, $0, $1) }) == 0, listen(listener, 128) == 0 else { throw POSIXError(.EADDRINUSE) }
        Thread { [listener, weak self] in
            while case let descriptor = accept(listener, nil, nil), descriptor >= 0 {
                guard let self, let script = nextScript() else {
                    System.closeDescriptor(descriptor)
                    break
                }
                Thread { self.serve(descriptor, script) }.start()
            }
            System.closeDescriptor(listener)
        }.start()
    }

    deinit { stop() }

    static func freshPath() -> String { "/tmp/mlx-\(UUID().uuidString.prefix(18)).sock" }

    /// The path of a socket whose server is gone.
    static func stalePath() throws -> String {
        let path = freshPath()
        let descriptor = socket(AF_UNIX, System.stream, 0)
        defer { System.closeDescriptor(descriptor) }
        guard try SocketAddress(path: path).withPointer({ bind(descriptor, $0, $1) }) == 0 else { throw POSIXError(.EADDRINUSE) }
        return path
    }

    var client: Client {
        Client(.unix(path: path), model: "tiny", timeouts: Timeouts(silence: .seconds(60)), reconnect: Reconnect(upTo: .zero))
    }

    /// The requests so far, heads and bodies as text.
    var requests: [String] { lock.withLock { received } }

    /// When clients closed connections that were on hold.
    var departures: [ContinuousClock.Instant] { lock.withLock { leftAt } }

    /// When the bytes of each step were sent.
    var sendings: [ContinuousClock.Instant] { lock.withLock { sentAt } }

    /// Listens no more; connections that exist go on. The last connection is what wakes the thread that accepts them.
    private func stop() {
        lock.withLock { scripts = [] }
        _ = try? Waker().connection(to: path)
        unlink(path)
    }

    private func nextScript() -> [Step]? { lock.withLock { scripts.count > 1 ? scripts.removeFirst() : scripts.first } }

    private func serve(_ descriptor: Int32, _ script: [Step]) {
        defer { System.closeDescriptor(descriptor) }
        for step in script {
            switch step {
            case .read:
                let request = readRequest(descriptor)
                lock.withLock { received.append(request) }
            case .send(let bytes):
                lock.withLock { sentAt.append(.now) }
                guard send(bytes, to: descriptor) else { return }
            case .drip(let bytes): for byte in bytes { guard send([byte], to: descriptor) else { return } }
            case .pause(let time):
                Thread.sleep(forTimeInterval: Double(time.components.attoseconds) / 1e18 + Double(time.components.seconds))
            case .hold:
                var buffer = [UInt8](repeating: 0, count: 1024)
                while buffer.withUnsafeMutableBytes({ System.receiveBytes(descriptor, $0) }) > 0 {}
                lock.withLock { leftAt.append(.now) }
            }
        }
    }

    private func send(_ bytes: [UInt8], to descriptor: Int32) -> Bool {
        var rest = bytes[...]
        while !rest.isEmpty {
            let count = rest.withUnsafeBytes { System.sendBytes(descriptor, $0) }
            guard count > 0 else { return false }
            rest = rest.dropFirst(count)
        }
        return true
    }

    private func readRequest(_ descriptor: Int32) -> String {
        var bytes: [UInt8] = []
        var buffer = [UInt8](repeating: 0, count: 64 << 10)
        while true {
            let text = String(decoding: bytes, as: UTF8.self)
            if let end = text.range(of: "\r\n\r\n") {
                let length = text.range(of: "Content-Length: ").flatMap { Int(text[$0.upperBound...].prefix { $0.isNumber }) } ?? 0
                if text[end.upperBound...].utf8.count >= length { return text }
            }
            let count = buffer.withUnsafeMutableBytes { System.receiveBytes(descriptor, $0) }
            guard count > 0 else { return text }
            bytes += buffer[..<count]
        }
    }
}

extension Waker {
    fileprivate func connection(to path: String) throws -> Connection {
        try Connection(to: .unix(path: path), waker: self, deadline: .now + .seconds(1))
    }
}

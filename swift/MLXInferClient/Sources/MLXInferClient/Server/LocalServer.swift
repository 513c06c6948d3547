import Foundation

/// A server on this machine: one that runs already, or one that this app starts, watches, and stops again.
///
/// ```swift
/// let server = LocalServer(ServerCommand(["smollm2"]))
/// try await server.start()
/// let answer = try await server.client.respond(to: "Hello")
/// await server.stop()
/// ```
///
/// A server that this app started ends with the app, however that ends. One that ends by itself is started again; one that was found is
/// replaced by one of the app's own when it goes away.
public actor LocalServer {
    /// How a server is.
    public enum State: Sendable, Equatable {
        case stopped
        /// It was started, and loads its models.
        case starting
        /// It answers; `ours` where this app started it.
        case ready(ours: Bool)
        /// It has ended, and is started again after a pause.
        case restarting(after: Duration, reason: String)
        /// It ends each time that it is started, and is not started again before ``LocalServer/start()``.
        case failed(MLXInferError)
    }

    /// When to start a server that has ended once more.
    public struct Restart: Sendable, Hashable {
        /// How many times in a row; a server that was ready for a minute begins a new row.
        public var attempts: Int
        /// The pause before the first; it doubles each time.
        public var firstPause: Duration
        /// The longest pause.
        public var longestPause: Duration

        public init(attempts: Int = 5, firstPause: Duration = .milliseconds(500), longestPause: Duration = .seconds(30)) {
            (self.attempts, self.firstPause, self.longestPause) = (attempts, firstPause, longestPause)
        }
    }

    public nonisolated let command: ServerCommand
    /// For requests to it.
    public nonisolated let client: Client
    /// How it is now.
    public private(set) var state = State.stopped {
        didSet { if state != oldValue { for listener in listeners.values { listener.yield(state) } } }
    }

    private let restart: Restart
    private let readyWithin: Duration
    private let grace: Int
    private let output: @Sendable (String) -> Void
    private var listeners: [Int: AsyncStream<State>.Continuation] = [:]
    private var lastListener = 0
    private var starting: Task<Void, any Error>?
    private var child: ChildProcess?
    private var watch: Task<Void, Never>?

    /// - Parameters:
    ///   - readyWithin: How long the models may take to load.
    ///   - grace: Seconds that running answers have when the server is stopped.
    ///   - output: Is given every line of the server's log; nil writes them to standard error.
    public init(
        _ command: ServerCommand, restart: Restart = Restart(), readyWithin: Duration = .seconds(300), grace: Int = 5,
        output: (@Sendable (String) -> Void)? = nil
    ) {
        (self.command, self.restart, self.readyWithin, self.grace) = (command, restart, readyWithin, grace)
        client = Client(command.endpoint)
        self.output = output ?? { FileHandle.standardError.write(Data(($0 + "\n").utf8)) }
    }

    /// How it is: now, and each time that this changes.
    public func states() -> AsyncStream<State> {
        let (stream, continuation) = AsyncStream.makeStream(of: State.self)
        lastListener += 1
        let number = lastListener
        listeners[number] = continuation
        continuation.onTermination = { [weak self] _ in Task { await self?.forget(number) } }
        continuation.yield(state)
        return stream
    }

    /// Returns once a server answers: the one that runs already, or a child of this process.
    ///
    /// - Throws: ``MLXInferError/serverEnded(reason:lastWords:)`` with the end of its log where it ends before it answers,
    ///   `CancellationError` where the task was cancelled or ``stop()`` was called meanwhile.
    public func start() async throws {
        let task = starting ?? Task { try await begin() }
        starting = task
        try await withTaskCancellationHandler {
            try await task.value
        } onCancel: {
            task.cancel()
        }
    }

    /// Stops the server if this app started it, and returns once it has ended. Running answers have `grace` seconds to finish.
    public func stop() async {
        let (started, watched) = (starting, watch)
        (starting, watch) = (nil, nil)
        started?.cancel()
        watched?.cancel()
        child?.stop()
        _ = await started?.result
        await watched?.value
        if starting == nil { state = .stopped }
    }

    private func forget(_ number: Int) { listeners[number] = nil }

    private func begin() async throws {
        do {
            let child = try await bring()
            watch = Task { await supervise(child) }
        } catch {
            starting = nil
            state = error is CancellationError ? .stopped : .failed(MLXInferError(error))
            throw error
        }
    }

    /// Brings the server back whenever it ends, until the task is cancelled or it has failed too often. Nil stands for a server found.
    private func supervise(_ first: ChildProcess?) async {
        var (child, row) = (first, 0)
        while !Task.isCancelled {
            let since = ContinuousClock.now
            var failure = await end(of: child)
            if .now - since > .seconds(60) { row = 0 }
            while true {
                guard !Task.isCancelled else { return }
                guard row < restart.attempts else {
                    (starting, state) = (nil, .failed(failure))
                    return
                }
                let pause = min(restart.firstPause * (1 << min(row, 20)), restart.longestPause)
                row += 1
                state = .restarting(after: pause, reason: failure.description)
                try? await Task.sleep(for: pause)
                do {
                    child = try await bring()
                    break
                } catch {
                    failure = MLXInferError(error)
                }
            }
        }
    }

    /// Waits for the end of a child, or of a server that was found, and returns what there is to say of it.
    private func end(of child: ChildProcess?) async -> MLXInferError {
        if let child { return Self.ended(await child.end.value, child) }
        for await isThere in client.availability() where !isThere { break }
        return .serverNotRunning(client.endpoint.description)
    }

    /// A server that answers: a child that has just been started, or nil for one that was there.
    private func bring() async throws -> ChildProcess? {
        if try await isThere() {
            state = .ready(ours: false)
            return nil
        }
        try Task.checkCancellation()
        state = .starting
        let child = try ChildProcess(command.words(), grace: grace, output: output)
        self.child = child
        do {
            try await ready(child)
        } catch {
            child.stop()
            let status = await child.end.value
            try Task.checkCancellation()
            switch error {
            case MLXInferError.serverNotRunning, MLXInferError.timedOut:
                throw MLXInferError.serverEnded(reason: "the server did not answer within \(readyWithin)", lastWords: child.lastWords)
            default: throw Self.ended(status, child)
            }
        }
        state = .ready(ours: true)
        return child
    }

    /// Whether a server runs already; one that still loads its models is waited for.
    private func isThere() async throws -> Bool {
        var hasty = client
        (hasty.reconnect, hasty.timeouts.silence) = (.never, readyWithin)
        do {
            return try await hasty.health().isReady
        } catch MLXInferError.serverNotRunning, MLXInferError.streamInterrupted, MLXInferError.api {
            return false
        }
    }

    /// Returns once the child answers; throws as soon as it has ended.
    private func ready(_ child: ChildProcess) async throws {
        let readiness = Task { [client, readyWithin] in try await client.waitUntilReady(upTo: readyWithin) }
        Task {
            _ = await child.end.value
            readiness.cancel()
        }
        try await withTaskCancellationHandler {
            try await readiness.value
        } onCancel: {
            readiness.cancel()
        }
    }

    private static func ended(_ status: Int32, _ child: ChildProcess) -> MLXInferError {
        .serverEnded(reason: "the server has ended with status \(status)", lastWords: child.lastWords)
    }
}

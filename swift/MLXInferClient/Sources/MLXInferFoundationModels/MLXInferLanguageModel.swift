#if canImport(FoundationModels, _version: 2)
    import FoundationModels
    import MLXInferClient

    /// A model of `mlxinfer serve` for Apple's `LanguageModelSession`.
    ///
    /// ```swift
    /// let session = LanguageModelSession(model: MLXInferLanguageModel(model: "smollm2"), instructions: "Be short.")
    /// print(try await session.respond(to: "What is the capital of France?").content)
    /// ```
    ///
    /// The server loads the weights once for all apps, and shares the cached start of their prompts.
    @available(macOS 27, iOS 27, visionOS 27, *)
    public struct MLXInferLanguageModel: LanguageModel {
        /// The name that the server lists; nil is the first model that the server has.
        public let model: String?
        public let endpoint: Endpoint
        public let timeouts: Timeouts
        public let reconnect: Reconnect
        /// All four unless the app says less. The server refuses a request that its model cannot do, and the session throws
        /// `unsupportedCapability` then.
        public let capabilities: LanguageModelCapabilities

        public init(
            model: String? = nil, endpoint: Endpoint = .default,
            capabilities: [LanguageModelCapabilities.Capability] = [.guidedGeneration, .toolCalling, .reasoning, .vision],
            timeouts: Timeouts = Timeouts(), reconnect: Reconnect = Reconnect()
        ) {
            (self.model, self.endpoint, self.timeouts, self.reconnect) = (model, endpoint, timeouts, reconnect)
            self.capabilities = LanguageModelCapabilities(capabilities)
        }

        public var executorConfiguration: Executor.Configuration {
            Executor.Configuration(model: model, endpoint: endpoint, timeouts: timeouts, reconnect: reconnect)
        }
    }

    @available(macOS 27, iOS 27, visionOS 27, *)
    extension MLXInferLanguageModel {
        /// Sends a session's requests to the server, and the server's events to the session.
        public struct Executor: LanguageModelExecutor {
            public typealias Model = MLXInferLanguageModel

            public struct Configuration: Hashable, Sendable {
                let model: String?
                let endpoint: Endpoint
                let timeouts: Timeouts
                let reconnect: Reconnect
            }

            let client: Client

            public init(configuration: Configuration) {
                let (timeouts, reconnect) = (configuration.timeouts, configuration.reconnect)
                client = Client(configuration.endpoint, model: configuration.model, timeouts: timeouts, reconnect: reconnect)
            }

            /// Has the server load the model and read the transcript into its prefix cache. Failures are not reported: the next request
            /// meets them again.
            public func prewarm(model: MLXInferLanguageModel, transcript: Transcript) {
                Task(priority: .utility) { try? await prefill(transcript) }
            }

            /// - Throws: `LanguageModelError` and `MLXInferError`.
            func prefill(_ transcript: Transcript) async throws {
                guard let sent = try SentRequest(prefilling: transcript) else { return }
                _ = try await client.respond(to: sent.chat)
            }

            /// - Throws: `LanguageModelError`, `MLXInferError` for what that has no case for, and `CancellationError`.
            public func respond(
                to request: LanguageModelExecutorGenerationRequest, model: MLXInferLanguageModel,
                streamingInto channel: LanguageModelExecutorGenerationChannel
            ) async throws {
                let sent = try SentRequest(request)
                let ids = EntryIDs()
                var answer = ChannelCalls(mustBeWhole: request.schema != nil)
                do {
                    for try await event in client.chat(sent.chat) {
                        for call in try answer.calls(for: event) { await call.send(to: channel, ids) }
                    }
                    try Task.checkCancellation()
                    for call in try answer.end() { await call.send(to: channel, ids) }
                } catch {
                    throw sent.languageModelError(error)
                }
            }
        }
    }
#endif

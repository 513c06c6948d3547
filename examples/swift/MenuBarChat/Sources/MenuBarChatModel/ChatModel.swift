import Foundation
import MLXInferClient
import Observation

/// The state behind the views: conversations, the models to choose from, and the server.
@MainActor @Observable
public final class ChatModel {
    public private(set) var chats: [Chat] = []
    public var selection: Chat.ID?
    public private(set) var models: [Model] = []
    public private(set) var server = LocalServer.State.stopped
    /// One line about a file or a message that was refused; the view clears it.
    public var problem: String?
    @ObservationIgnored private let local: LocalServer
    @ObservationIgnored private let store: ChatStore
    /// The last change of a file, which ends after all others.
    @ObservationIgnored private(set) var saving: Task<Void, Never>?
    @ObservationIgnored private var waiting: Task<Void, Never>?

    public init(_ command: ServerCommand, folder: URL, log: (@Sendable (String) -> Void)? = nil) {
        (local, store) = (LocalServer(command, output: log), ChatStore(folder: folder))
        let found = store.load()
        chats = found.chats.map { Chat(local.client, $0) }
        if !found.unreadable.isEmpty { problem = "not a conversation: \(found.unreadable.joined(separator: ", "))" }
        if let latest = chats.first { selection = latest.id } else { newChat() }
    }

    /// Finds or starts the server and follows its states, until the task is cancelled.
    public func run() async {
        connect()
        for await state in await local.states() {
            server = state
            if case .ready = state { await listModels() }
            if case .failed = state { waitForServer() }
        }
        waiting?.cancel()
        await local.stop()
    }

    public func connect() {
        waiting?.cancel()
        Task { [local] in try? await local.start() }  // a failure is a state
    }

    /// Connects once somebody else has started a server.
    private func waitForServer() {
        waiting = Task { [client = local.client, weak self] in
            for await isThere in client.availability() where isThere { break }
            if !Task.isCancelled { self?.connect() }
        }
    }

    public var isReady: Bool { if case .ready = server { true } else { false } }

    /// The server's state in words, with the command to type if the app cannot start it.
    public var status: String {
        let models = local.command.models.joined(separator: " ")
        return switch server {
        case .stopped: "Looking for a server"
        case .starting: "Loading \(models)"
        case .ready(let ours): ours ? "Server of this app" : "Server at \(local.client.endpoint)"
        case .restarting(_, let reason): "Starting again: \(reason)"
        case .failed(let error): "\(error.localizedDescription)\nIn Terminal: mlxinfer serve \(models) --socket '\(local.client.endpoint)'"
        }
    }

    public func listModels() async {
        do { models = try await local.client.models() } catch { problem = error.localizedDescription }
    }

    public var selected: Chat? { chats.first { $0.id == selection } }

    /// Selects an empty conversation, a new one if necessary.
    public func newChat() {
        if !chats.contains(where: \.isEmpty) { chats.insert(Chat(local.client), at: 0) }
        selection = chats.first(where: \.isEmpty)?.id
    }

    public func remove(_ chat: Chat) {
        guard let place = chats.firstIndex(where: { $0 === chat }) else { return }
        chat.conversation.stop()
        chats.remove(at: place)
        write { [id = chat.id] in try $0.remove(id) }
        guard selection == chat.id else { return }
        if chats.isEmpty { newChat() } else { selection = chats[min(place, chats.count - 1)].id }
    }

    public func attach(_ files: [URL]) {
        for file in files {
            do { selected?.attachments.append(try Attachment(contentsOf: file)) } catch { problem = error.localizedDescription }
        }
    }

    /// Sends the message. A picture that the model cannot see is refused here, as it would stay in the conversation.
    public func send() {
        guard let chat = selected, chat.canSend else { return }
        let used = chat.conversation.request.model.map { name in models.first { $0.id == name } } ?? models.first
        let unseen = used?.seesImages == false ? chat.attachments.first(where: \.isPicture) : nil
        problem = unseen.map { "\(used?.id ?? "") does not see pictures: remove \($0.name) or choose another model" }
        guard unseen == nil else { return }
        chat.conversation.send(chat.prompt, chat.attachments.map(\.part))
        (chat.prompt, chat.attachments, chat.changed) = ("", [], Date())
        chats.sort { $0.changed > $1.changed }
        save(chat)
    }

    public func retry() {
        selected?.conversation.retry()
        selected.map(save)
    }

    /// Saves a conversation now, and again at the end of its answer.
    private func save(_ chat: Chat) {
        write { [stored = chat.stored] in try $0.save(stored) }
        Task {
            await chat.conversation.settled()
            if chats.contains(where: { $0 === chat }) { write { [stored = chat.stored] in try $0.save(stored) } }
        }
    }

    /// Changes files one after the other, away from the main thread.
    private func write(_ change: @escaping @Sendable (ChatStore) throws -> Void) {
        saving = Task { [before = saving, store] in
            await before?.value
            let result = await Task.detached { Result { try change(store) } }.value
            if case .failure(let error) = result { problem = "not saved: \(error.localizedDescription)" }
        }
    }
}
